"""Names for `scaletorch.compose`, beside the public ones.

They are recorded in building.txt and versioned: a patch release changes none of them.
"""

from .layouts import layout_for_length
from .masks import CU_SEQLENS
from .models.settings import expect_attention, note_shards
from .models.transformers_mask import require_computable
from .sharding import DEFAULT

__all__ = [
    "CU_SEQLENS",
    "DEFAULT",
    "expect_attention",
    "layout_for_length",
    "note_shards",
    "require_computable",
]
