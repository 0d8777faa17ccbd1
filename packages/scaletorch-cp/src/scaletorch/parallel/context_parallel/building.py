"""Names for `scaletorch.compose`, beside the public ones.

They are recorded in building.txt and versioned: a patch release changes none of them.
"""

from .layouts.layout import layout_for_length
from .layouts.sharding import DEFAULT
from .masks.documents import CU_SEQLENS
from .models.arguments import require_computable
from .models.settings import expect_attention, note_shards

__all__ = [
    "CU_SEQLENS",
    "DEFAULT",
    "expect_attention",
    "layout_for_length",
    "note_shards",
    "require_computable",
]
