"""Names for `scaletorch.compose` and checkpoints, beside the public ones.

They are recorded in building.txt and versioned: a patch release changes none of them.
"""

from .gradients.norm import clip_by, found_on_ranks, norm_over, scale_gradients
from .parameters import name_culprits
from .sharding.shards import Shard, ShardedGradient, is_sharded, settled_shards
from .wrapper import NARROW, widened

__all__ = [
    "NARROW",
    "Shard",
    "ShardedGradient",
    "clip_by",
    "found_on_ranks",
    "is_sharded",
    "name_culprits",
    "norm_over",
    "scale_gradients",
    "settled_shards",
    "widened",
]
