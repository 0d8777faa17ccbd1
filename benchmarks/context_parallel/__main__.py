"""Attention over two ranks by every method, compared with torch's own attention in one process.

Causal forward and backward of 8 heads of size 64, on two ranks of one thread each, and of the full
sequence by `F.scaled_dot_product_attention` in one process of one thread. Every repeat runs all
ways once, in the same processes, shuffled. Every result is compared with one process. "hybrid" is
left out: on two ranks it is a ring or Ulysses.

    python -m benchmarks.context_parallel --length 4096 8192
    python -m benchmarks.context_parallel --length 32768 --forward --dtype bfloat16 --repeats 1

One table for each size; except for waiting, the larger figure of the two ranks counts.

- ms: median of the repeats.
- speed-up: median and quartiles of each repeat's ratio of one process to the way.
- CPU ms: median CPU time of the busier rank, including gloo's threads, and one process's over it.
- waiting: median time in communication calls and waits, in separate repeats, on the rank that
  spends less, over that of a repeat.
- bytes: sent by each rank, and the difference from the method's formula, which is for the
  comparison of the ranks' arguments.
- MiB: peak memory of tensors, without the inputs.

If several lengths are measured, a last table shows how ms and MiB grow with them.
"""

from __future__ import annotations

import itertools

from scaletorch.dist import RankPool

from ..harness.costs import DTYPES, RANKS
from ..harness.tables import parser
from .measure import Size, measure
from .tables import show, show_growth


def main() -> None:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument("--length", type=int, nargs="+", default=[4096, 8192])
    command.add_argument("--forward", type=int, nargs="*", default=[16384], help="lengths, alone")
    command.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    command.add_argument("--repeats", type=int, default=7)
    options = command.parse_args()
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
