"""Pipelines of ours and of `torch.distributed.pipelining`, by every schedule that both have.

Both cut the same model, in the same processes of one thread each; every repeat runs a step of each
schedule and contender, shuffled. Every gradient is compared with one process that accumulates the
micro-batches in order. Our `zb_h1` is compared with torch's interleaved zero bubble with one stage
a rank.

    python -m benchmarks.pipeline_parallel --part A B C
    python -m benchmarks.pipeline_parallel --quick --part C  # as root: see harness/links.py

A. Two ranks and a transformer: step time, gradients, memory, and use of the ranks.
B. Four ranks and almost no work: the host's cost of an action, by number of micro-batches.
C. Two and four ranks with 2 ms more latency each way. "sleeping" layers take time but no core, as
   if every rank had its own device; four transformers would wait for two cores.

The largest figure of the ranks counts. Ratios are medians and quartiles of each repeat's own ratio.

- x simulated: time from the first action to the last over that of `simulate` with the same
  schedule, the step's own mean time of each kind of action, and the latency, but without further
  costs of a message.
- bubble: share of that time in which ranks compute nothing.
- live: on each rank, the largest number of (stage, micro-batch) graphs that keep anything. Inputs
  and gradients of linear layers that ours keeps for a "W" are in no graph, but in the peak.
- peak MiB: peak memory of tensors in a step, without weights.
- CPU us: time of all threads of all ranks over their actions; main us: of their main threads.
"""

from __future__ import annotations

from dataclasses import replace

from scaletorch.dist import RankPool

from ..harness.ranks import run_on_links
from ..harness.tables import parser
from .measure import Figures, Key, Plan, measure
from .models import DTYPES, Size
from .tables import show_fill, show_hosts, show_slow, show_steps

TRANSFORMER = Size("transformer", 8, 256, 8, 2, 96)
SLEEPING = replace(TRANSFORMER, layer="sleeping", batch=1, length=16)
LINEAR = Size("linear", 8, 8, 8, 1, 1)
LATENCIES = (0.0, 0.002)


def part_a(quick: bool) -> None:
    """Measure steps of a transformer."""
    with RankPool(2, timeout=None) as pool:
        for dtype in list(DTYPES)[: 1 if quick else None]:
            size = replace(TRANSFORMER, dtype=dtype)
            plan = Plan(2 if quick else 5, recorded=1 if quick else 3, memory=True)
            ranks = pool.run(measure, size, plan)
            show_steps(size, ranks)
            show_fill(ranks)


def part_b(quick: bool) -> None:
    """Measure the host's cost of actions."""
    with RankPool(4, timeout=None) as pool:
        for micro_batches in (8, 32, 128)[: 2 if quick else None]:
            size = replace(LINEAR, micro_batches=micro_batches)
            plan = Plan(3 if quick else max(9, 240 // micro_batches))
            show_hosts(size, pool.run(measure, size, plan))


def part_c(quick: bool) -> None:
    """Measure steps on slow links."""
    cases = [(SLEEPING, 2), (SLEEPING, 4), (TRANSFORMER, 2)]
    for size, num_ranks in cases[: 2 if quick else None]:
        plan = Plan(2 if quick else 5)
        found = {
            latency: on_slow_links(size, num_ranks, replace(plan, latency=latency))
            for latency in LATENCIES
        }
        show_slow(size, found)


def on_slow_links(size: Size, num_ranks: int, plan: Plan) -> list[dict[Key, Figures]]:
    """Return each rank's measurements."""
    return run_on_links(measure, num_ranks, plan.latency, None, size, plan)


PARTS = {"A": part_a, "B": part_b, "C": part_c}


def main() -> None:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS)
    command.add_argument("--quick", action="store_true", help="less of all, to see that it runs")
    options = command.parse_args()
    for part in options.part:
        PARTS[part](options.quick)


if __name__ == "__main__":
    main()
