"""Blocks of query-key pairs, and how a band is cut into blocks that kernels are fast at.

A block is a rectangle of local rows and keys of which row i sees key j where
`lower <= j - i <= upper`, counted within the block. Fused kernels know two bands: FULL, and
CAUSAL on squares. `cut` makes a few of those out of any rectangle, and other bands only if
a lower bound cuts through, which is the far edge of a sliding window.

Rows per tile at such an edge are a compromise: small tiles compute little that is not seen,
and each costs a start and a merge, as much as some 3,000 pairs on CPU (heads 8, dim 64) and
more on other devices. √3,000 would be best there, but in bf16 the fused CPU kernels need five
times the time for a pair in blocks of 64 rows that they need in blocks of 256.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

Band: TypeAlias = tuple[int | None, int | None]  # lower and upper; None is no bound

FULL: Band = (None, None)
CAUSAL: Band = (None, 0)  # of square blocks

TILE = 256


class Block(NamedTuple):
    """A rectangle of pairs: runs of local rows and keys, and the band that is seen of it."""

    rows: slice
    keys: slice
    band: Band


def work(blocks: Iterable[Block]) -> int:
    """Return how many pairs kernels compute for the blocks.

    All of a block's pairs, but of a CAUSAL square the seen ones alone, as kernels skip the rest
    (in tiles: a square of one tile costs them as much as a full one).
    """
    return sum(_seen(block) if block.band == CAUSAL else _area(block) for block in blocks)


def pairs(blocks: Iterable[Block]) -> int:
    """Return how many pairs of the blocks see each other."""
    return sum(map(_seen, blocks))


def cut(block: Block) -> Iterator[Block]:
    """Cut a block into FULL ones, CAUSAL squares and, at a window's far edge, other bands.

    Each pair that sees each other is in exactly one of them. Without a lower bound they are
    three at most; with one, a few for every `TILE` rows, and fewer than `TILE` pairs of a row
    are computed unseen.
    """
    block = _cropped(block)
    height, (lower, upper) = _length(block.rows), block.band
    if not _area(block):
        return
    if lower is None:
        yield from _to_upper(block)
    elif upper is None:
        yield from _from_lower(block, lower)
    elif upper - lower + 1 >= TILE:
        yield from _wide(block, lower, upper)
    elif height > TILE:
        for rows in _steps(0, height, TILE):
            yield from cut(_part(block, rows, (0, _length(block.keys))))
    else:
        yield block


def uncut(block: Block) -> Iterator[Block]:
    """Yield a block without the rows and keys at its ends that see nothing, if any are left."""
    block = _cropped(block)
    if _area(block):
        yield block


def _to_upper(block: Block) -> Iterator[Block]:
    """Cut a block without a lower bound into left of the square, square, and below it."""
    height, width, upper = _length(block.rows), _length(block.keys), block.band[1]
    if upper is None:
        yield block
        return
    side = width - upper
    yield from _parts(block, (0, side), (0, upper))
    yield from _parts(block, (0, side), (upper, width))
    yield from _parts(block, (side, height), (0, width))


def _from_lower(block: Block, lower: int) -> Iterator[Block]:
    """Cut a block without an upper bound into the rows that see all, and tiles along the edge."""
    height, width = _length(block.rows), _length(block.keys)
    yield from _parts(block, (0, -lower), (0, width))
    for first, end in _steps(-lower, height, TILE):
        yield from _parts(block, (first, end), (first + lower, end + lower))
        yield from _parts(block, (first, end), (end + lower, width))


def _wide(block: Block, lower: int, upper: int) -> Iterator[Block]:
    """Cut a band into parts with one bound each: of as many rows as it is wide, left and right.

    Right is a CAUSAL square at the upper bound: in so few rows the lower one does not reach it.
    """
    width = _length(block.keys)
    for first, end in _steps(0, _length(block.rows), upper - lower + 1):
        edge = min(first + upper, width)
        for keys in ((0, edge), (edge, width)):
            for part in _parts(block, (first, end), keys):
                yield from cut(part)


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


def _steps(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the ends of runs of at most `step` from `start` to `stop`."""
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


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
