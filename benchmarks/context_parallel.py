"""Attention over two ranks by every method, beside one process of torch's own attention.

Causal forward and backward of 8 heads of 64, on two ranks of one thread each, and of the whole
sequence by ``F.scaled_dot_product_attention`` in one process of one thread. Every repeat runs all
ways once, in the same processes, shuffled. Every result is compared with one process. "hybrid" is
not among the ways: on two ranks its parts are one rank or both, so it is a ring or Ulysses.

    python benchmarks/context_parallel.py --length 4096 8192
    python benchmarks/context_parallel.py --length 32768 --forward --dtype bfloat16 --repeats 1

One table a size; of the two ranks the larger figure counts, but for waiting.

- ms: median of the repeats.
- speed-up: median of each repeat's own ratio of one process to the way, and its quartiles.
- CPU ms: median CPU time of the busier rank, gloo's threads included, and one process's over it.
- waiting: median share of the time in communication calls and waits; of the rank that spends less.
- bytes: sent by each rank, and how many more than by the formula of the method, `volumes`: 128
  are the comparison of what the ranks were called with.
- MiB: the most that tensors took, beside the inputs.

Where several lengths were measured, a last table shows how ms and MiB grow with them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_parallel_tables import ALONE, Figures, Size, show, show_growth
from gauges import Run, exposed, peak, sent
from torch import Tensor

from scaletorch.dist import RankPool
from scaletorch.parallel.context_parallel import LAYOUTS, attention
from scaletorch.parallel.context_parallel.methods.volumes import volumes

RANKS, HEADS, HEAD_DIM = 2, 8, 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Way:
    """How a sequence is divided, and how ranks attend."""

    method: str
    layout: str

    def formula(self, size: Size) -> int:
        """Return the bytes that each rank sends."""
        length, dtype = size.length // RANKS, DTYPES[size.dtype]
        volume = volumes(HEADS, HEADS, length, HEAD_DIM, ranks=RANKS, dtype=dtype)[self.method]
        return sum(volume) if size.backward else volume.forward


WAYS = {
    "ring, zigzag": Way("ring", "zigzag"),
    "ring, contiguous": Way("ring", "contiguous"),
    "all_gather, zigzag": Way("all_gather", "zigzag"),
    "ulysses": Way("ulysses", "zigzag"),
}


def step(attend: Callable[..., Tensor], inputs: list[Tensor], backward: bool) -> list[Tensor]:
    """Return the output of [1, H, L, D] inputs, and the gradients of all three."""
    if not backward:
        with torch.no_grad():
            return [attend(*inputs[:3])]
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attend(*leaves)
    out.backward(inputs[3])
    return [out.detach(), *(torch.as_tensor(x.grad) for x in leaves)]


def prepare(size: Size) -> dict[str, Run]:
    """Return each way's step, after a look at its results."""
    generator = torch.Generator().manual_seed(1)
    shape = 1, HEADS, size.length, HEAD_DIM
    whole = [torch.randn(shape, generator=generator).to(DTYPES[size.dtype]) for _ in range(4)]
    plain = partial(F.scaled_dot_product_attention, is_causal=True)
    alone = partial(step, plain, whole, size.backward)
    expected, runs = alone(), {}
    for name, way in WAYS.items():
        held = LAYOUTS[way.layout](size.length, RANKS).positions(dist.get_rank())
        own = [x[:, :, held].contiguous() for x in whole]
        attend = partial(attention, causal=True, layout=way.layout, method=way.method)
        runs[name] = partial(step, partial(attend, group=dist.group.WORLD), own, size.backward)
        check(name, runs[name](), [x[:, :, held] for x in expected], size.dtype)
    return runs | {ALONE: alone if dist.get_rank() == 0 else lambda: None}  # the others wait


def check(name: str, found: Any, expected: list[Tensor], dtype: str) -> None:
    """Stop where a way computes something else than one process."""
    # In bfloat16 one process itself loses 2e-2 of dK and dV at 32,768 positions, a ring half.
    bound = 1e-5 if dtype == "float32" else 5e-2
    for mine, theirs in zip(found, expected, strict=True):
        error = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
        if not error <= bound:  # a NaN is not
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


def measure(size: Size, repeats: int) -> dict[str, Figures]:
    """Measure every way on this rank."""
    runs = prepare(size)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    names, order = list(runs), random.Random(0)
    for _ in range(repeats):
        order.shuffle(names)
        for name in names:
            times[name].append(timed(runs[name]))
    return {name: figures(name, size, run, times[name]) for name, run in runs.items()}


def figures(name: str, size: Size, run: Run, times: list[tuple[float, float]]) -> Figures:
    """Measure all of a way but its times, and put it together with them."""
    formula = WAYS[name].formula(size) if name in WAYS else 0
    waits = [waiting(run) for _ in range(max(1, len(times) // 3))]
    return Figures(sent(run), formula, peak(run), times, waits)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--forward", type=int, nargs="*", default=[16384], help="lengths, alone")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of every start and stop
    lengths = [(length, True) for length in options.length]
    lengths += [(length, False) for length in options.forward]
    results = {}
    with RankPool(RANKS, timeout=None) as pool:
        for (length, backward), dtype in itertools.product(lengths, options.dtype):
            size = Size(length, dtype, backward)
            results[size] = pool.run(measure, size, options.repeats)
            show(size, results[size])
    show_growth(results)


if __name__ == "__main__":
    main()
