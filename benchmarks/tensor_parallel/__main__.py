"""A Llama block over two ranks: ours, torch's DTensor plans, and linear layers written by hand.

Forward and backward of one block on two ranks of one thread each, without and with sequence
parallelism (the block's input and output are then sequence shards), and of the full block in one
process of one thread. `by_hand.py` is the floor. Every repeat runs all ways once, in the same
processes, shuffled. Every result is compared with one process.

    python -m benchmarks.tensor_parallel --hidden 512 1024 --tokens 1x8 1x64 1x512 4x256

One table for each size; except for exposed ms, the larger figure of the two ranks counts.

- ms: median of the repeats.
- x floor: median and quartiles of each repeat's ratio to the way by hand.
- bytes sent: by each rank, as if every collective were a ring. On two ranks all_reduce of n bytes
  sends n; all_gather to n bytes, and reduce_scatter (also one made of all_to_all) of n bytes, send
  n / 2.
- / formula: that over 4 x tokens x hidden x element size, plus the norms' gradients with sequence
  parallelism.
- peak MiB: peak memory of tensors in forward and backward, without weights and input.
- exposed ms: median time in communication calls and waits, in separate repeats, on the rank that
  spends less, since the other one also waits for its peer.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence

from scaletorch.dist import RankPool

from ..harness.costs import ALONE, DTYPES, RANKS, Ranks, sent_and_held, slowest
from ..harness.tables import parser, ratio, table
from .measure import Size, measure
from .ways import WAYS

COLUMNS = ["way", "ms", "x floor (quartiles)", "bytes sent", "/ formula", "peak MiB", "exposed ms"]


def show(size: Size, ranks: Ranks) -> None:
    """Print the table of one size."""
    repeats = len(ranks[0][ALONE].spent)
    title = f"hidden {size.hidden}, tokens {size.batch}x{size.length}, {size.dtype}"
    print(f"\n{title}, {repeats} repeats\n\n{table(COLUMNS, rows(size, ranks))}", flush=True)


def rows(size: Size, ranks: Ranks) -> Iterator[Sequence[str]]:
    """Yield a row for each way; waiting for a slower rank is not communication."""
    times = slowest(ranks)
    for name, seconds in times.items():
        sequence = name in WAYS and WAYS[name].sequence
        floor = times["by hand, sequence" if sequence else "by hand"]
        yield [
            name, f"{1e3 * statistics.median(seconds):.2f}", ratio(seconds, floor),
            *sent_and_held(ranks, name, size.formula(sequence)),
        ]  # fmt: skip


def main() -> None:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument("--hidden", type=int, nargs="+", default=[512, 1024])
    command.add_argument("--tokens", nargs="+", default=["1x8", "1x64", "1x512", "4x256"])
    command.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    command.add_argument("--seconds", type=float, default=1.0, help="about, a way and size")
    options = command.parse_args()
    with RankPool(RANKS, timeout=None) as pool:
        for hidden, text, dtype in itertools.product(options.hidden, options.tokens, options.dtype):
            batch, length = map(int, text.split("x"))
            size = Size(hidden, batch, length, dtype)
            show(size, pool.run(measure, size, options.seconds))


if __name__ == "__main__":
    main()
