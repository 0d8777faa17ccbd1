"""Blocks of query-key pairs, and the division of a band into blocks for which kernels are fast.

A block is a rectangle of local rows and keys in which row i sees key j if
`lower <= j - i <= upper`, counted within the block. All fused kernels know two bands: FULL, and
CAUSAL on squares. `split` divides a band without a lower bound into a few of those. A lower bound
is the far edge of a sliding window: such a block stays whole, for kernels that take any window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

Band: TypeAlias = tuple[int | None, int | None]  # lower and upper; None is no bound

FULL: Band = (None, None)
CAUSAL: Band = (None, 0)  # of square blocks


class Block(NamedTuple):
    """A rectangle of pairs: local rows, local keys, and the visible band."""

    rows: slice
    keys: slice
    band: Band


def visible_rows(band: Band, rows: int, keys: int) -> range:
    """Return the rows of a block that see a key; the other rows are at its ends."""
    lower, upper = band
    if not keys or (lower is not None and upper is not None and lower > upper):
        return range(0)
    first = 0 if upper is None else max(0, -upper)
    end = rows if lower is None else min(rows, keys - lower)
    return range(first, max(first, end))


def visible_keys(band: Band, rows: range, keys: int) -> range:
    """Return the keys from the first to the last that one of these visible rows sees."""
    lower, upper = band
    left = 0 if lower is None else max(0, rows.start + lower)
    return range(left, keys if upper is None else min(keys, rows.stop + upper))


def count_pairs(blocks: Iterable[Block]) -> int:
    """Return the number of visible pairs of the blocks."""
    total = 0
    for rows, keys, band in blocks:
        height, width = rows.stop - rows.start, keys.stop - keys.start
        seeing = visible_rows(band, height, width)
        total += sum(len(visible_keys(band, range(i, i + 1), width)) for i in seeing)
    return total


def split(block: Block) -> Iterator[Block]:
    """Divide a block into at most three FULL ones and CAUSAL squares, or leave a window whole.

    Each visible pair is in exactly one of them. Rows and keys at the ends that see nothing or that
    nothing sees are in none.
    """
    height, width = block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
    rows = visible_rows(block.band, height, width)
    if not rows:
        return
    (block,) = _sub_block(block, rows, visible_keys(block.band, rows, width))
    height, width = block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
    lower, upper = block.band
    if lower is not None or upper is None:
        yield block
        return
    side = width - upper
    yield from _sub_block(block, range(side), range(upper))
    yield from _sub_block(block, range(side), range(upper, width))
    yield from _sub_block(block, range(side, height), range(width))


def _sub_block(block: Block, rows: range, keys: range) -> Iterator[Block]:
    """Yield a block's rectangle unless it is empty; bounds that do not cut it become None."""
    if not rows or not keys:
        return
    (lower, upper), shift = block.band, rows.start - keys.start
    lower = None if lower is None or lower + shift <= 1 - len(rows) else lower + shift
    upper = None if upper is None or upper + shift >= len(keys) - 1 else upper + shift
    top, left = block.rows.start, block.keys.start
    yield Block(
        slice(top + rows.start, top + rows.stop),
        slice(left + keys.start, left + keys.stop),
        (lower, upper),
    )
