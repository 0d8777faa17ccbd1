"""Adding up a part of every rank's tensor, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ..wire.sums import fold

CHUNK = 2**18  # elements that are added up at a time: few enough to stay in a cache


def sums(
    everyone: Sequence[Tensor], part: slice, start: Tensor | None, *, mean: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yield the sum of a part piece by piece, and where each piece begins.

    Args:
        everyone: Flat tensors of one dtype.
        part: Which elements to add up.
        start: What the sum of the part begins with, after division.
        mean: Divide by the number of tensors.
    """
    divisor = len(everyone) if mean else 1
    for at in range(part.start, part.stop, CHUNK):
        stop = min(at + CHUNK, part.stop)
        first = None if start is None else start[at - part.start : stop - part.start]
        yield at, fold([each[at:stop] for each in everyone], start=first, divisor=divisor)
