"""Pictures of layouts and masks, made of the blocks that ranks compute."""

from __future__ import annotations

from itertools import product
from string import ascii_letters, digits

from ....dist.errors import InvalidArgumentError
from ..layouts.layout import Layout
from .mask import Mask, blocks

SYMBOLS = digits + ascii_letters
UNSEEN = "."


def draw(layout: Layout, mask: Mask) -> str:
    """Draw which rank computes which pairs: a line per query, a character per key.

    The character is the rank, as a digit and from 10 on as a letter, or a dot where the mask
    lets the query not see the key. For short lengths: a length of 2N draws a zigzag's chunks.

    Raises:
        InvalidArgumentError: More than 62 ranks, or documents that do not end at the length.
    """
    if layout.size > len(SYMBOLS):
        message = f"a picture tells {len(SYMBOLS)} ranks apart; this layout has {layout.size}"
        raise InvalidArgumentError(message)
    picture = [[UNSEEN] * layout.length for _ in range(layout.length)]
    for (rank, rows), keys in product(enumerate(layout.ranks), layout.ranks):
        _fill(picture, SYMBOLS[rank], mask, rows, keys)
    return "\n".join("".join(line) for line in picture)


def _fill(
    picture: list[list[str]],
    symbol: str,
    mask: Mask,
    rows: tuple[range, ...],
    keys: tuple[range, ...],
) -> None:
    row_positions = [position for run in rows for position in run]
    key_positions = [position for run in keys for position in run]
    for block in blocks(mask, rows, keys, len(picture)):
        lower, upper = block.band
        for (i, row), (j, key) in product(
            enumerate(row_positions[block.rows]), enumerate(key_positions[block.keys])
        ):
            if (lower is None or lower <= j - i) and (upper is None or j - i <= upper):
                picture[row][key] = symbol
