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

import itertools
import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from scaletorch.dist import RankPool

from ..harness.costs import ALONE, DTYPES, RANKS, Figures, Ranks, sent_and_held, slowest
from ..harness.ranks import run_on_links
from ..harness.tables import machine, parser, ratio, table
from .block import CODES
from .measure import SKEWS, Size, measure

COLUMNS = [
    "way", "ms", "x by hand (quartiles)", "x by hand, CPU", "bytes sent", "/ formula", "peak MiB",
    "exposed ms",
]  # fmt: skip


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


def rows(ranks: Ranks, formula: int) -> Iterator[Sequence[str]]:
    """Yield a row for each way; waiting for a slower rank is not communication."""
    spent = {name: [rank[name].spent for rank in ranks] for name in ranks[0]}
    times = slowest(ranks)
    cpu = {name: [sum(s.cpu for s in both) for both in zip(*each, strict=True)]
           for name, each in spent.items()}  # fmt: skip
    for name, seconds in times.items():
        yield [
            name, f"{1e3 * statistics.median(seconds):.2f}", ratio(seconds, times["by hand"]),
            ratio(cpu[name], cpu["by hand"]), *sent_and_held(ranks, name, formula),
        ]  # fmt: skip


def main() -> None:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument("--hidden", type=int, default=512)
    command.add_argument("--tokens", type=int, nargs="+", default=[64, 1024], help="of each rank")
    command.add_argument("--routing", nargs="+", default=list(SKEWS), choices=SKEWS)
    command.add_argument("--code", nargs="+", default=list(CODES), choices=CODES)
    command.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    command.add_argument("--shared", action="store_true", help="with a shared expert")
    command.add_argument("--slow", action="store_true", help="ranks 10 ms from each other (root)")
    command.add_argument("--seconds", type=float, default=1.0, help="about, a way and size")
    options = command.parse_args()
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
