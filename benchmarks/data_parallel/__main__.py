"""Gradient reduction on two ranks, and whole steps, by our wrappers and by torch's.

Two ranks of one thread, over gloo. Every repeat runs a step of each way, shuffled, in the same
processes. A step frees the last gradients, computes new ones and makes them equal on both ranks;
in part D an optimizer follows, and three consecutive steps are timed.

    python -m benchmarks.data_parallel --out data_parallel.md
    python -m benchmarks.data_parallel --quick --part A D
    python -m benchmarks.data_parallel --slow                # as root: see harness/links.py

A. One backward a step, of a model of 21 M parameters and one of 105 M.
B. Four micro-batches a step, with accumulation.
C. The same in bfloat16, with gradients accumulated and reduced in float32.
D. Steps with AdamW, its state sharded over the ranks or not.
E. Memory, on new ranks for each way.
F. (`--slow`) A small model on links of 10 ms each way, and on links of 100 Mbit/s.
G. (`--slow`) The same on four ranks of two nodes, with such a link between the nodes.

The slower rank counts. Ratios are medians and quartiles of each repeat's own ratio.

- CPU ms: of all threads of the busier rank; more reliable than ms if others use the cores.
- differ: largest relative difference of a parameter's gradient from DDP's. In C it is from the
  exact sum of the bfloat16 gradients of all micro-batches and ranks (a way that computes a norm in
  another precision, as autocast does, has another such sum). In D it is of all parameters after two
  steps from those of the first way.
- communication ms: time in which any collective is in flight, from its call to its completion, in
  separate recorded steps. Hidden: the share of it in which the computing thread is in forward or
  backward and does not wait. DDP is measured by a communication hook.
- MiB: peak resident memory in three steps, above that with the model alone. In the third step no
  buckets are rebuilt; it is compared with compute alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from scaletorch.dist import RankPool
from scaletorch.dist.testing import preload

from ..harness.ranks import run_on_links, run_on_nodes
from ..harness.tables import machine, parser, publish
from .checks import Plan
from .measure import Memory, measure, memory
from .models import Size
from .tables import peaks, times

RANKS = 2
MIDDLE = Size(dim=512, layers=6, length=512)
LARGE = Size(dim=1024, layers=8, length=128)
SMALL = Size(dim=256, layers=4, length=1024, batch=4)
LINKS = {"10 ms each way": (0.01, None), "100 Mbit/s": (0.0, 12.5e6)}
Part = Callable[[bool], Iterator[str]]


def backward(quick: bool) -> Iterator[str]:
    """Compare gradients of one backward."""
    yield timed(Plan("gradients", MIDDLE, 2 if quick else 9, recorded=1 if quick else 2))
    if not quick:
        yield timed(Plan("gradients", LARGE, 5, recorded=2))


def accumulation(quick: bool) -> Iterator[str]:
    """Compare gradients of four micro-batches."""
    size = replace(MIDDLE, micro_batches=4)
    yield timed(Plan("gradients", replace(size, length=128) if quick else size, 1 if quick else 4))
    if not quick:
        yield timed(Plan("gradients", replace(LARGE, length=64, micro_batches=4), 3))


def mixed(quick: bool) -> Iterator[str]:
    """Compare float32 gradients of bfloat16 parameters."""
    size = replace(MIDDLE, micro_batches=4, dtype="bfloat16")
    yield timed(Plan("mixed", size, 1 if quick else 7, recorded=0 if quick else 1))


def training(quick: bool) -> Iterator[str]:
    """Compare whole steps."""
    if quick:
        yield timed(Plan("training", MIDDLE, 1))
        return
    yield timed(Plan("training", MIDDLE, 4, recorded=1, burst=3))
    size = replace(MIDDLE, dtype="bfloat16")
    yield timed(Plan("mixed training", size, 4, recorded=1, burst=3))


def memories(quick: bool) -> Iterator[str]:
    """Compare peaks of memory."""
    size = replace(MIDDLE, dtype="bfloat16")
    plans = [
        Plan("gradients", MIDDLE, 0),
        Plan("mixed", replace(size, micro_batches=4), 0),
        Plan("training", MIDDLE, 0),
        Plan("mixed training", size, 0),
    ]
    for plan in plans[: 1 if quick else None]:
        yield peaks(plan, {name: on_new_ranks(plan, name) for name in plan.ways})


def slow(quick: bool) -> Iterator[str]:
    """Compare gradients on slow links."""
    plan = Plan("slow", SMALL, 2 if quick else 5, recorded=1)
    for what, (latency, bandwidth) in LINKS.items():
        found = run_on_links(measure, RANKS, latency, bandwidth, plan)
        yield times(plan, found, f", {what}")


def nodes(quick: bool) -> Iterator[str]:
    """Compare gradients over slow links between nodes."""
    plan = Plan("nodes", replace(SMALL, batch=2), 2 if quick else 5, recorded=1)
    for what, (latency, bandwidth) in LINKS.items():
        found = run_on_nodes(measure, 2, RANKS, latency, bandwidth, plan)
        yield times(plan, found, f", 2 nodes x {RANKS} ranks, {what}")


def timed(plan: Plan) -> str:
    """Measure on new ranks; return a table."""
    with RankPool(RANKS, timeout=None) as pool:
        return times(plan, pool.run(measure, plan))


def on_new_ranks(plan: Plan, name: str) -> list[Memory]:
    """Measure one way's memory."""
    with RankPool(RANKS, timeout=None) as pool:
        return pool.run(memory, plan, name)


PARTS: dict[str, Part] = {
    "A": backward, "B": accumulation, "C": mixed, "D": training, "E": memories, "F": slow,
    "G": nodes,
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument("--part", nargs="+", choices=PARTS, help="A to E by default")
    command.add_argument("--slow", action="store_true", help="parts F and G alone")
    command.add_argument("--quick", action="store_true", help="less of all, in two minutes")
    command.add_argument("--out", type=Path, help="file that gets the tables too")
    options = command.parse_args()
    preload("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim")
    parts = options.part or list("FG" if options.slow else "ABCDE")
    publish(report(parts, options.quick), options.out)


def report(parts: list[str], quick: bool) -> Iterator[str]:
    """Yield the lines to print."""
    yield f"{RANKS} ranks (G: {2 * RANKS}), {machine()}"
    for part in parts:
        start = time.perf_counter()
        yield f"\n## {part}. {PARTS[part].__doc__}"
        yield from PARTS[part](quick)
        yield f"\n{time.perf_counter() - start:.0f} s"


if __name__ == "__main__":
    main()
