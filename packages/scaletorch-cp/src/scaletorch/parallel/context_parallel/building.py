"""What `scaletorch.compose` takes of this package beside its users' names.

Recorded and versioned like the rest: a patch release changes nothing here.
"""

from .alone import alone, each_alone
from .layouts.layout import layout_of_whole
from .layouts.sharding import DEFAULT
from .masks.documents import CU_SEQLENS
from .models.calls import require_computable
from .models.looking import apart, looking, without_zeros
from .models.settings import asked, note_shards

__all__ = [
    "CU_SEQLENS",
    "DEFAULT",
    "alone",
    "apart",
    "asked",
    "each_alone",
    "layout_of_whole",
    "looking",
    "note_shards",
    "require_computable",
    "without_zeros",
]
