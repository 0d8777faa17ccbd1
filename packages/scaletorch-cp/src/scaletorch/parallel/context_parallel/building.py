"""What `scaletorch.compose` takes of this package beside its users' names.

Recorded and versioned like the rest: a patch release changes nothing here.
"""

from .layouts.layout import layout_of_whole
from .layouts.sharding import DEFAULT
from .masks.documents import CU_SEQLENS
from .models.calls import require_computable
from .models.settings import expect_attention, note_shards

__all__ = [
    "CU_SEQLENS",
    "DEFAULT",
    "expect_attention",
    "layout_of_whole",
    "note_shards",
    "require_computable",
]
