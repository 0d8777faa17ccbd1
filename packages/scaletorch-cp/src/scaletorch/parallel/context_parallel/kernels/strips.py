"""Strips of a block's rows, and the keys that a band lets them see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks.blocks import Band


class Strip(NamedTuple):
    """Rows next to each other, and the keys from the first to the last that one of them sees."""

    rows: range
    keys: range


def strips(band: Band, rows: int, keys: int, step: int) -> Iterator[Strip]:
    """Yield strips of `step` rows at most. Every row of a strip sees a key; no other row does."""
    lower, upper = band
    seeing = seeing_rows(band, rows, keys)
    for first in seeing[::step]:
        end = min(first + step, seeing.stop)
        left = 0 if lower is None else max(0, first + lower)
        right = keys if upper is None else min(keys, end + upper)
        yield Strip(range(first, end), range(left, right))


def seeing_rows(band: Band, rows: int, keys: int) -> range:
    """Return the rows that see a key: the others are at the ends of a block."""
    lower, upper = band
    if not keys or (lower is not None and upper is not None and lower > upper):
        return range(0)
    first = 0 if upper is None else max(0, -upper)
    end = rows if lower is None else min(rows, keys - lower)
    return range(first, max(first, end))


def hide_(scores: Tensor, band: Band, strip: Strip) -> Tensor:
    """Put −inf into scores [..., rows, keys] of a strip if the row does not see the key."""
    lower, upper = band
    rows, keys = strip
    shift = rows.start - keys.start
    if upper is not None:
        # Keys from here on lie behind those that the first row sees.
        first = max(0, shift + upper + 1)
        edge = scores[..., first:]
        edge.masked_fill_(_ones(edge).triu_(shift + upper + 1 - first), -torch.inf)
    if lower is not None:
        # Keys up to here lie before those that the last row sees.
        edge = scores[..., : max(0, shift + lower + len(rows) - 1)]
        edge.masked_fill_(_ones(edge).tril_(shift + lower - 1), -torch.inf)
    return scores


def sees_all(band: Band, strip: Strip) -> bool:
    """Return whether every row of a strip sees every key of it."""
    lower, upper = band
    rows, keys = strip
    return (upper is None or keys[-1] - rows[0] <= upper) and (
        lower is None or keys[0] - rows[-1] >= lower
    )


def _ones(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
