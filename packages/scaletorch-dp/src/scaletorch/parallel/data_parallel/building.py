"""Names for `scaletorch.compose` and checkpoints, in addition to the public ones.

They are recorded in building.txt and versioned: a patch release changes none of them.
"""

from .data_parallel import NARROW as NARROW
from .data_parallel import widened as widened
from .gradients import clip_by as clip_by
from .gradients import found_on_ranks as found_on_ranks
from .gradients import norm_over as norm_over
from .gradients import scale_gradients as scale_gradients
from .parameters import name_culprits as name_culprits
from .sharding.shards import Shard as Shard
from .sharding.shards import ShardedGradient as ShardedGradient
from .sharding.shards import is_sharded as is_sharded
from .sharding.shards import settled_shards as settled_shards
