"""Data parallelism: gradients summed over ranks in buckets, under one loss rule."""

from ._version import __version__
from .buckets.bucket import Bucket
from .buckets.manager import BucketManager
from .data_parallel import DataParallelBucket, DataParallelNaive
from .gradients.norm import clip_grad_norm_, global_grad_norm
from .gradients.scaler import GradScaler
from .loss import global_token_count, global_token_mean
from .sharding.shard_optimizer import shard_optimizer, whole_gradients
from .shards import Shard, parameter_shards

__all__ = [
    "Bucket",
    "BucketManager",
    "DataParallelBucket",
    "DataParallelNaive",
    "GradScaler",
    "Shard",
    "__version__",
    "clip_grad_norm_",
    "global_grad_norm",
    "global_token_count",
    "global_token_mean",
    "parameter_shards",
    "shard_optimizer",
    "whole_gradients",
]
