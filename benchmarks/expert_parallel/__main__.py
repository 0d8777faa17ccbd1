"""A block of experts over two ranks: ours, transformers' own, and all-to-alls written by hand.

Forward and backward of a router and 8 experts, top-2, on two ranks of one thread each, every rank
with its own tokens; and of all tokens in one process of one thread. Routing is that of a random
router, or skewed so that the first expert gets nearly every token. Every repeat runs all ways once,
in the same processes, shuffled. Every result is compared with one process.

    python -m benchmarks.expert_parallel --tokens 64 1024 --dtype float32 bfloat16
    python -m benchmarks.expert_parallel --shared    # each block with a shared expert, too
    python -m benchmarks.expert_parallel --slow      # as root, on slow links: harness/links.py

One table for each size; except for exposed ms, the larger figure of the two ranks counts.

- ms: median of the repeats.
- x by hand: median and quartiles of each repeat's ratio to the way by hand.
- x by hand, CPU: the same for the CPU time of both ranks, which other programs affect least.
- bytes sent: by each rank, as if every collective were a ring.
- / formula: that over the bytes of the rows that have to go to the other rank, each token once a
  rank: there and back, in forward and in backward.
- peak MiB: peak memory of tensors in forward and backward, without weights and input.
- exposed ms: median time in communication calls and waits, on the rank that spends less, since the
  other one also waits for its peer.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from scaletorch.dist import RankPool

from ..harness.ranks import run_on_links
from ..harness.tables import MIB, largest, machine, ratio, table
from .block import CODES
from .measure import ALONE, DTYPES, RANKS, SKEWS, Figures, Size, measure

COLUMNS = [
    "way",
    "ms",
    "x by hand (quartiles)",
    "x by hand, CPU",
    "bytes sent",
    "/ formula",
    "peak MiB",
    "exposed ms",
]


def show(size: Size, ranks: list[tuple[dict[str, Figures], int]]) -> None:
    """Print the table of one size."""
    repeats = len(ranks[0][0][ALONE].spent)
    title = f"hidden {size.hidden}, {size.experts} experts, top-{size.top_k}"
    title += ", a shared one" * size.shared
    title += f", {size.code}, {size.tokens} tokens a rank, {size.routing}, {size.dtype}"
    title += f", {repeats} repeats"
    found = [figures for figures, _ in ranks]
    formula = max(each for _, each in ranks)
    print(f"\n{title}\n\n{table(COLUMNS, rows(found, formula))}", flush=True)


def rows(ranks: list[dict[str, Figures]], formula: int) -> Iterator[Sequence[str]]:
    """Yield a row for each way; waiting for a slower rank is not communication."""
    spent = {name: [rank[name].spent for rank in ranks] for name in ranks[0]}
    times = {name: largest(each, lambda s: s.wall) for name, each in spent.items()}
    cpu = {name: [sum(s.cpu for s in both) for both in zip(*each, strict=True)]
           for name, each in spent.items()}  # fmt: skip
    for name, seconds in times.items():
        bytes_sent = max(rank[name].sent for rank in ranks)
        waits = map(min, zip(*(rank[name].exposed for rank in ranks), strict=True))
        yield [
            name, f"{1e3 * statistics.median(seconds):.2f}", ratio(seconds, times["by hand"]),
            ratio(cpu[name], cpu["by hand"]), str(bytes_sent), f"{bytes_sent / formula:.2f}",
            f"{max(rank[name].peak for rank in ranks) / MIB:.2f}",
            f"{1e3 * statistics.median(waits):.2f}",
        ]  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024], help="of each rank")
    parser.add_argument("--routing", nargs="+", default=list(SKEWS), choices=SKEWS)
    parser.add_argument("--code", nargs="+", default=list(CODES), choices=CODES)
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--shared", action="store_true", help="with a shared expert")
    parser.add_argument("--slow", action="store_true", help="ranks 10 ms from each other (root)")
    parser.add_argument("--seconds", type=float, default=1.0, help="about, a way and size")
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler logs every start and stop
    print(machine())
    with RankPool(RANKS, timeout=None) as pool:
        alike = partial(pool.run, measure)
        run = partial(run_on_links, measure, RANKS, 0.01, None) if options.slow else alike
        for code, tokens, routing, dtype in itertools.product(
            options.code, options.tokens, options.routing, options.dtype
        ):
            size = Size(options.hidden, 8, 2, tokens, routing, dtype, options.shared, code)
            show(size, run(size, options.seconds))


if __name__ == "__main__":
    main()
