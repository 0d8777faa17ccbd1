"""Names for `scaletorch.compose`, in addition to the public ones.

They are recorded in building.txt and versioned: a patch release changes none of them.
"""

from .layouts import layout_for_length as layout_for_length
from .masks import CU_SEQLENS as CU_SEQLENS
from .models.override import is_pretrained as is_pretrained
from .models.settings import expect_attention as expect_attention
from .models.settings import note_padding as note_padding
from .models.settings import note_shards as note_shards
from .models.transformers_mask import require_computable as require_computable
from .sharding import DEFAULT as DEFAULT
