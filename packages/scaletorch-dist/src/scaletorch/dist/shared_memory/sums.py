"""Adding up a part of every rank's tensor, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

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
        yield at, _fold([each[at:stop] for each in everyone], first, divisor)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a sum: float32 for 16-bit floats."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _fold(blocks: Sequence[Tensor], start: Tensor | None, divisor: int) -> Tensor:
    """Add blocks from the first to the last, behind ``start``."""
    dtype = wide(blocks[0].dtype)
    if start is not None:
        total = start.to(dtype, copy=True)
        for block in blocks:
            total += block if divisor == 1 else block.to(dtype) / divisor
        return total
    total = torch.add(blocks[0].to(dtype), blocks[1])
    for block in blocks[2:]:
        total += block
    return total if divisor == 1 else total.div_(divisor)
