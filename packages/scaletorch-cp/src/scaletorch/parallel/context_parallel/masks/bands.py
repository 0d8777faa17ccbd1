"""Which keys of a block its rows see: row i sees key j where lower <= j - i <= upper.

Both are counted within the block; None is no bound.
"""

from __future__ import annotations

from typing import TypeAlias

Band: TypeAlias = tuple[int | None, int | None]

FULL: Band = (None, None)
CAUSAL: Band = (None, 0)  # of square blocks
