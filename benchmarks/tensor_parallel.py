"""A Llama block over two ranks: ours, torch's DTensor plans, and linear layers written by hand.

Forward and backward of one block on two ranks of one thread each, without and with sequence
parallelism (the block's input and output are shares of the sequence then), and of the whole block
in one process of one thread. `by_hand.py` is the floor. Every repeat runs all ways once, in the
same processes, shuffled. Every result is compared with one process.

    python benchmarks/tensor_parallel.py --hidden 512 1024 --tokens 1x8 1x64 1x512 4x256

One table a size; of the two ranks the larger figure counts, but for exposed ms.

- ms: median of the repeats.
- x floor: median of each repeat's own ratio to the way by hand, and its quartiles.
- bytes sent: by each rank, were every collective a ring. On two ranks all_reduce of n bytes sends
  n; all_gather to n bytes, and reduce_scatter (also one made of all_to_all) of n bytes, send n / 2.
- / formula: that over 4 x tokens x hidden x element size. With sequence parallelism it is the same,
  and the norms' gradients.
- peak MiB: the most that tensors took in forward and backward, beside weights and input.
- exposed ms: median time in communication calls and in waiting for them, in repeats of its own; of
  the rank that spends less there, since the other one also waits for it to come.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from gauges import Run, exposed, peak, sent
from torch import Tensor, nn
from ways import NORMS, WAYS, Finish, nothing

from scaletorch.dist import RankPool
from scaletorch.models.llama import Block, LlamaConfig, rotary_tables

RANKS = 2
HEAD_DIM = 64
LEAST, MOST = 15, 200  # repeats
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ALONE = "one process"


@dataclass(frozen=True)
class Size:
    """What a block is run on."""

    hidden: int
    batch: int
    length: int
    dtype: str

    def formula(self, sequence: bool) -> int:
        """Return the bytes that two ranks need to send, each."""
        tokens, norms = self.batch * self.length, len(NORMS) if sequence else 0
        return (4 * tokens + norms) * self.hidden * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Figures:
    """What was measured of one way; a list has one entry for each repeat.

    Attributes:
        sent: bytes.
        peak: bytes.
        seconds: of forward and backward.
        exposed: seconds in communication.
    """

    sent: int
    peak: int
    seconds: list[float]
    exposed: list[float]


def make(size: Size) -> Block:
    """Return the whole block, the same on every rank."""
    torch.manual_seed(0)
    heads = size.hidden // HEAD_DIM
    config = LlamaConfig(
        hidden_size=size.hidden, intermediate_size=size.hidden * 3, num_heads=heads,
        num_kv_heads=heads,
    )  # fmt: skip
    return Block(config).to(DTYPES[size.dtype])


def own_share(x: Tensor) -> Tensor:
    """Return this rank's share of a sequence [B, L, H]."""
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def step(
    block: nn.Module, x: Tensor, tables: tuple[Tensor, Tensor], finish: Finish = nothing
) -> tuple[Tensor, Tensor]:
    """Run forward and backward; return the output and the input's gradient, shaped as ``x``.

    Args:
        block: the block.
        x: [B, L, H], or this rank's share of the sequence.
        tables: of the rotary embedding.
        finish: is called with the block after backward.
    """
    x = x.detach().requires_grad_()
    out = block(x, *tables)
    out.sum().backward()
    finish(block)
    for parameter in block.parameters():
        parameter.grad = None
    return out.detach(), torch.as_tensor(x.grad)


def prepare(size: Size) -> dict[str, Run]:
    """Return each way's step, after a look at its results."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size.batch, size.length, size.hidden, generator=generator)
    x = x.to(DTYPES[size.dtype])
    tables = rotary_tables(torch.arange(size.length)[None], HEAD_DIM, 1e4, torch.float32)
    whole = make(size)
    alone = partial(step, whole, x, tables)
    expected, runs = alone(), {}
    for name, way in WAYS.items():
        change = own_share if way.sequence else Tensor.contiguous
        block = way.divide(copy.deepcopy(whole))
        runs[name] = partial(step, block, change(x), tables, way.finish)
        check(name, runs[name](), tuple(map(change, expected)), size.dtype)
    return runs | {ALONE: alone if dist.get_rank() == 0 else lambda: None}  # the others wait


def check(name: str, found: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: str) -> None:
    """Stop where a way computes something else than one process."""
    bound = 1e-4 if dtype == "float32" else 1e-1
    for mine, theirs in zip(found, expected, strict=True):
        error = float((mine - theirs).norm() / theirs.norm())
        if not error <= bound:  # a NaN is not
            raise SystemExit(f"{name} is wrong by {error:.1e}")


def timed(run: Run) -> float:
    """Return the seconds of a call, from when all ranks are there."""
    dist.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def count_repeats(runs: Mapping[str, Run], seconds: float) -> int:
    """Return how often to run all ways for about ``seconds`` each, the same on every rank."""
    spent = torch.tensor(sum(map(timed, runs.values())))
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return min(MOST, max(LEAST, int(seconds * len(runs) / spent.item())))


def repeated(
    gauge: Callable[[Run], float], runs: Mapping[str, Run], repeats: int
) -> dict[str, list[float]]:
    """Return what was measured of every way, which take turns in the same order on all ranks."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    names, order = list(runs), random.Random(0)
    for _ in range(repeats):
        order.shuffle(names)
        for name in names:
            found[name].append(gauge(runs[name]))
    return found


def measure(size: Size, seconds: float) -> dict[str, Figures]:
    """Measure every way on this rank, for about ``seconds`` each."""
    runs = prepare(size)
    repeats = count_repeats(runs, seconds)
    times = repeated(timed, runs, repeats)
    waits = repeated(exposed, runs, repeats // 3)
    # Gloo's threads may free what they sent late: the lesser of two peaks is the way's own.
    peaks = {name: min(peak(run) for _ in range(2)) for name, run in runs.items()}
    return {
        name: Figures(sent(run), peaks[name], times[name], waits[name])
        for name, run in runs.items()
    }


def joint(ranks: Sequence[Figures]) -> Figures:
    """Return the ranks' figures as one; waiting for a slower rank is not communication."""
    return Figures(
        max(rank.sent for rank in ranks),
        max(rank.peak for rank in ranks),
        [max(repeat) for repeat in zip(*(rank.seconds for rank in ranks), strict=True)],
        [min(repeat) for repeat in zip(*(rank.exposed for rank in ranks), strict=True)],
    )


def show(size: Size, ranks: list[dict[str, Figures]]) -> None:
    """Print one size."""
    found = {name: joint([rank[name] for rank in ranks]) for name in ranks[0]}
    repeats = len(found[ALONE].seconds)
    title = f"hidden {size.hidden}, tokens {size.batch}x{size.length}, {size.dtype}"
    print(f"\n{title}, {repeats} repeats\n")
    print("| way | ms | x floor (quartiles) | bytes sent | / formula | peak MiB | exposed ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, figures in found.items():
        sequence = name in WAYS and WAYS[name].sequence
        floor = found["by hand, sequence" if sequence else "by hand"]
        ratios = [a / b for a, b in zip(figures.seconds, floor.seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        print(
            f"| {name} | {1e3 * statistics.median(figures.seconds):.2f} | "
            f"{middle:.3f} ({low:.3f}-{high:.3f}) | {figures.sent} | "
            f"{figures.sent / size.formula(sequence):.2f} | {figures.peak / 2**20:.2f} | "
            f"{1e3 * statistics.median(figures.exposed):.2f} |",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--tokens", nargs="+", default=["1x8", "1x64", "1x512", "4x256"])
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--seconds", type=float, default=1.0, help="about, a way and size")
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of every start and stop
    with RankPool(RANKS, timeout=None) as pool:
        for hidden, text, dtype in itertools.product(options.hidden, options.tokens, options.dtype):
            batch, length = map(int, text.split("x"))
            size = Size(hidden, batch, length, dtype)
            show(size, pool.run(measure, size, options.seconds))


if __name__ == "__main__":
    main()
