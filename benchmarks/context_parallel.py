"""Attention over two ranks by every method, beside one process of torch's own attention.

Causal forward and backward of 8 heads of 64, on two ranks of one thread each, and of the whole
sequence by ``F.scaled_dot_product_attention`` in one process of one thread. Every repeat runs all
ways once, in the same processes, shuffled. Every result is compared with one process.

    python benchmarks/context_parallel.py --length 4096 8192

One table a size; of the two ranks the larger figure counts, but for waiting.

- ms: median of the repeats.
- speed-up: median of each repeat's own ratio of one process to the way, and its quartiles.
- CPU ms: median CPU time of the busier rank, gloo's threads included, and one process's over it.
- waiting: median share of the time in communication calls and waits; of the rank that spends less.
- bytes sent: by each rank, and their ratio to the formula of the method.
- peak MiB: the most that tensors took, beside the inputs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gauges import Run, exposed, peak, sent
from torch import Tensor

from scaletorch.dist import RankPool
from scaletorch.parallel.context_parallel import LAYOUTS, attention

RANKS, HEADS, HEAD_DIM = 2, 8, 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ALONE = "one process"


@dataclass(frozen=True)
class Way:
    """How a sequence is divided, and how ranks attend."""

    method: str
    layout: str

    def formula(self, shard: int, item: int, backward: bool) -> float:
        """Return the bytes that each of two ranks sends.

        Args:
            shard: elements of q on a rank; k, v and the output have as many.
            item: bytes of an element; gradients travel in at least 4.
            backward: count forward and backward, or forward alone.
        """
        wide = max(item, 4)
        if self.method == "ulysses":  # half of q, k, v, output; then of its gradient and theirs
            return 2 * shard * item + backward * shard * (item + 3 * wide) / 2
        return 2 * shard * item + backward * 2 * shard * (item + wide)


WAYS = {
    "ring, zigzag": Way("ring", "zigzag"),
    "ring, contiguous": Way("ring", "contiguous"),
    "all_gather, zigzag": Way("all_gather", "zigzag"),
    "ulysses": Way("ulysses", "zigzag"),
}


@dataclass(frozen=True)
class Figures:
    """What was measured of one way; a list has one entry for each repeat.

    Attributes:
        sent: bytes.
        peak: bytes.
        times: wall and CPU seconds.
        exposed: share of the time that is communication.
    """

    sent: int
    peak: int
    times: list[tuple[float, float]]
    exposed: list[float]


def step(attend: Callable[..., Tensor], inputs: list[Tensor], backward: bool) -> list[Tensor]:
    """Return the output of [1, H, L, D] inputs, and the gradients of all three."""
    if not backward:
        with torch.no_grad():
            return [attend(*inputs[:3])]
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attend(*leaves)
    out.backward(inputs[3])
    return [out.detach(), *(torch.as_tensor(x.grad) for x in leaves)]


def prepare(length: int, dtype: str, backward: bool) -> dict[str, Run]:
    """Return each way's step, after a look at its results."""
    generator = torch.Generator().manual_seed(1)
    shape = 1, HEADS, length, HEAD_DIM
    whole = [torch.randn(shape, generator=generator).to(DTYPES[dtype]) for _ in range(4)]
    alone = partial(step, partial(F.scaled_dot_product_attention, is_causal=True), whole, backward)
    expected, runs = alone(), {}
    for name, way in WAYS.items():
        held = LAYOUTS[way.layout](length, RANKS).positions(dist.get_rank())
        own = [x[:, :, held].contiguous() for x in whole]
        attend = partial(attention, causal=True, layout=way.layout, method=way.method)
        runs[name] = partial(step, partial(attend, group=dist.group.WORLD), own, backward)
        check(name, runs[name](), [x[:, :, held] for x in expected], dtype)
    return runs | {ALONE: alone if dist.get_rank() == 0 else lambda: None}  # the others wait


def check(name: str, found: Any, expected: list[Tensor], dtype: str) -> None:
    """Stop where a way computes something else than one process."""
    bound = 1e-5 if dtype == "float32" else 1e-2
    for mine, theirs in zip(found, expected, strict=True):
        error = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
        if error > bound:
            raise SystemExit(f"{name} is wrong by {error:.1e}")


def timed(run: Run) -> tuple[float, float]:
    """Return the wall and CPU seconds of a call, from when all ranks are there."""
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - cpu


def waiting(run: Run) -> float:
    """Return the share of a call's time that this thread communicates or waits for it."""
    start = time.perf_counter()
    spent = exposed(run)
    return spent / (time.perf_counter() - start)


def measure(length: int, dtype: str, backward: bool, repeats: int) -> dict[str, Figures]:
    """Measure every way on this rank."""
    runs = prepare(length, dtype, backward)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    names, order = list(runs), random.Random(0)
    for _ in range(repeats):
        order.shuffle(names)
        for name in names:
            times[name].append(timed(runs[name]))
    return {
        name: Figures(
            sent(run), peak(run), times[name], [waiting(run) for _ in range(max(1, repeats // 3))]
        )
        for name, run in runs.items()
    }


def show(length: int, dtype: str, backward: bool, ranks: list[dict[str, Figures]]) -> None:
    """Print one size."""
    what = "forward and backward" if backward else "forward"
    print(f"\n{length} positions, {dtype}, {what}\n")
    print(
        "| way | ms | speed-up (quartiles) | CPU ms, speed-up | waiting | bytes, / formula | MiB |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    alone = ranks[0][ALONE].times
    for name in ranks[0]:
        own = [rank[name] for rank in ranks]
        walls, busy = (
            [max(repeat) for repeat in zip(*([t[i] for t in f.times] for f in own), strict=True)]
            for i in (0, 1)
        )
        ratios = [one[0] / wall for one, wall in zip(alone, walls, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        cpu = statistics.median(one[1] for one in alone) / statistics.median(busy)
        waits = statistics.median(map(min, zip(*(f.exposed for f in own), strict=True)))
        shard = HEADS * HEAD_DIM * length // RANKS
        sends = max(f.sent for f in own)
        formula = (
            0.0 if name == ALONE else WAYS[name].formula(shard, DTYPES[dtype].itemsize, backward)
        )
        print(
            f"| {name} | {1e3 * statistics.median(walls):.1f} | {middle:.2f} "
            f"({low:.2f}-{high:.2f}) | {1e3 * statistics.median(busy):.1f}, {cpu:.2f} | "
            f"{waits:.1%} | {sends}{f', {sends / formula:.3f}' if formula else ''} | "
            f"{max(f.peak for f in own) / 2**20:.1f} |",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--forward", type=int, nargs="*", default=[16384], help="lengths, alone")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of every start and stop
    sizes = [(length, True) for length in options.length]
    sizes += [(length, False) for length in options.forward]
    with RankPool(RANKS, timeout=None) as pool:
        for (length, backward), dtype in itertools.product(sizes, options.dtype):
            found = pool.run(measure, length, dtype, backward, options.repeats)
            show(length, dtype, backward, found)


if __name__ == "__main__":
    main()
