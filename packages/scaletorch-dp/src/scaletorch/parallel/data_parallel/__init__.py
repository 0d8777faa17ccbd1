"""Data parallelism: gradients summed over ranks in buckets, under one loss rule."""

from ..pg_manager import global_token_count, global_token_mean
from ._version import __version__
from .buckets.bucket import Bucket
from .buckets.manager import BucketManager
from .data_parallel import DataParallelBucket, DataParallelNaive
from .gradients import GradScaler, clip_grad_norm_, global_grad_norm
from .sharding.shards import Shard, parameter_shards
from .zero import shard_optimizer, whole_gradients

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
