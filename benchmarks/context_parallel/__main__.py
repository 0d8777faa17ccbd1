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
- waiting: median share of time in communication calls and waits, on the rank that spends less.
- bytes: sent by each rank, and the difference from the method's formula: 128 bytes are
  for the comparison of the ranks' arguments.
- MiB: peak memory of tensors, without the inputs.

If several lengths are measured, a last table shows how ms and MiB grow with them.
"""

from __future__ import annotations

import argparse
import itertools
import os

from scaletorch.dist import RankPool

from .measure import DTYPES, RANKS, measure
from .tables import Size, show, show_growth


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--forward", type=int, nargs="*", default=[16384], help="lengths, alone")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler logs every start and stop
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
