"""Blocks of query-key pairs, and how a band is cut into blocks that kernels are fast at.

A block is a rectangle of local rows and keys of which row i sees key j where
`lower <= j - i <= upper`, counted within the block. All fused kernels know two bands: FULL, and
CAUSAL on squares. `cut` makes a few of those out of a band without a lower bound. A lower bound is
the far edge of a sliding window: such a block stays whole, for kernels that take any window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

Band: TypeAlias = tuple[int | None, int | None]  # lower and upper; None is no bound

FULL: Band = (None, None)
CAUSAL: Band = (None, 0)  # of square blocks


class Block(NamedTuple):
    """A rectangle of pairs: runs of local rows and keys, and the band that is seen of it."""

    rows: slice
    keys: slice
    band: Band


def pairs(blocks: Iterable[Block]) -> int:
    """Return how many pairs of the blocks see each other."""
    return sum(map(_seen, blocks))


def cut(block: Block) -> Iterator[Block]:
    """Cut a block into FULL ones and CAUSAL squares, three at most, or leave a window whole.

    Each pair that sees each other is in exactly one of them. Rows and keys at the ends that see
    nothing are in none.
    """
    block = _cropped(block)
    height, width, (lower, upper) = _length(block.rows), _length(block.keys), block.band
    if not _area(block):
        return
    if lower is not None or upper is None:
        yield block
        return
    side = width - upper
    yield from _parts(block, (0, side), (0, upper))
    yield from _parts(block, (0, side), (upper, width))
    yield from _parts(block, (side, height), (0, width))


def _cropped(block: Block) -> Block:
    """Drop the rows and keys at the ends that see nothing and that nothing sees."""
    height, width = _length(block.rows), _length(block.keys)
    lower, upper = block.band
    if lower is not None and upper is not None and lower > upper:
        return _part(block, (0, 0), (0, 0))
    first = 0 if upper is None else max(0, -upper)
    end = height if lower is None else min(height, width - lower)
    left = 0 if lower is None else max(0, first + lower)
    right = width if upper is None else min(width, end + upper)
    return _part(block, (first, max(first, end)), (left, max(left, right)))


def _parts(block: Block, rows: tuple[int, int], keys: tuple[int, int]) -> Iterator[Block]:
    """Yield a part of a block unless it is empty."""
    if rows[0] < rows[1] and keys[0] < keys[1]:
        yield _part(block, rows, keys)


def _part(block: Block, rows: tuple[int, int], keys: tuple[int, int]) -> Block:
    """Return a part of a block; bounds that do not cut through it become None."""
    height, width, shift = rows[1] - rows[0], keys[1] - keys[0], rows[0] - keys[0]
    lower, upper = (None if bound is None else bound + shift for bound in block.band)
    if lower is not None and lower <= 1 - height:
        lower = None
    if upper is not None and upper >= width - 1:
        upper = None
    top, left = block.rows.start, block.keys.start
    return Block(
        slice(top + rows[0], top + rows[1]), slice(left + keys[0], left + keys[1]), (lower, upper)
    )


def _seen(block: Block) -> int:
    height, width, (lower, upper) = _length(block.rows), _length(block.keys), block.band
    if block.band == CAUSAL:
        return height * (height + 1) // 2
    left = 0 if lower is None else sum(min(max(i + lower, 0), width) for i in range(height))
    right = (
        height * width
        if upper is None
        else sum(min(max(i + upper + 1, 0), width) for i in range(height))
    )
    return right - left


def _area(block: Block) -> int:
    return _length(block.rows) * _length(block.keys)


def _length(part: slice) -> int:
    return int(part.stop - part.start)
