"""Placements of tensors on one axis of the grid, conversions, boundaries, and `ModelView`.

| placement | each rank holds | its gradient on each rank is |
| --- | --- | --- |
| `Replicate()` | the same tensor | a term of a sum: `Partial()` |
| `Invariant()` | the same tensor | the same: `Invariant()` |
| `Shard(dim)` | its shard along a dim | its shard along that dim: `Shard(dim)` |
| `Varying()` | its own tensor | its own: `Varying()` |
| `Partial()` | a term of a sum | the same: `Replicate()` |

`Replicate` and `Invariant` hold the same values and differ in their gradients, which decides
where gradients are summed. The terms are those of the package `spmd_types`.
"""

from .boundary import Boundary, ModelView, ends, modules_within
from .conversion import Invariant, Partial, Placement, Replicate, Shard, Varying, convert
from .cut import Cut, fuse, shard_sizes, share_cut

__all__ = [
    "Boundary",
    "Cut",
    "Invariant",
    "ModelView",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Varying",
    "convert",
    "ends",
    "fuse",
    "modules_within",
    "shard_sizes",
    "share_cut",
]
