"""Plain data as lines of text: a table no wider than a screen."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest

WIDTH = 100

# After a blank or a dot, but not inside of a size such as 4 x 4.
_BREAKS = re.compile(r"(?<=[ .])(?!x )(?<! x )")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return lines of columns; equal rows, as layers have, are one with their number.

    Cells are broken at blanks and dots where the lines would be longer than `WIDTH`.
    """
    counted = Counter(map(tuple, rows))
    cells = [(*head, "times"), *((*row, str(times)) for row, times in counted.items())]
    widths = _widths(cells)
    return [
        "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()
        for row in cells
        for parts in zip_longest(*map(_wrap, row, widths), fillvalue="")
    ]


def _widths(cells: Sequence[Sequence[str]]) -> list[int]:
    """Return how wide columns are: the widest gives way first, and names in front do last."""
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    for index in (*sorted(range(1, len(widths)), key=lambda i: -widths[i]), 0):
        pieces = (piece.rstrip() for cell in columns[index] for piece in _BREAKS.split(cell))
        spared = min(max(excess, 0), widths[index] - max(map(len, pieces)))
        widths[index] -= spared
        excess -= spared
    return widths


def _wrap(cell: str, width: int) -> list[str]:
    lines = [""]
    for piece in _BREAKS.split(cell):
        if len((lines[-1] + piece).rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]
