"""Placements of a tensor on one axis of the grid, conversions between them, and a model's view.

| placement | a rank has | a rank's gradient is |
| --- | --- | --- |
| `Replicate()` | the same tensor as all others | a term of a sum: `Partial()` |
| `Invariant()` | the same tensor as all others | the same on all: `Invariant()` |
| `Shard(dim)` | its piece along a dim | its piece along that dim: `Shard(dim)` |
| `Varying()` | a tensor of its own | its own: `Varying()` |
| `Partial()` | a term of a sum | the same on all: `Replicate()` |

`Replicate` and `Invariant` hold the same values and differ in their gradients, which decides
where gradients are summed. The words are those of the package `spmd_types`.
"""

from .conversion import (
    Invariant,
    Partial,
    Placement,
    Replicate,
    Shard,
    Varying,
    convert,
)
from .cut import Cut, fuse, shard_sizes, share_cut
from .view import ModelView, modules_within

__all__ = [
    "Cut",
    "Invariant",
    "ModelView",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Varying",
    "convert",
    "fuse",
    "modules_within",
    "shard_sizes",
    "share_cut",
]
