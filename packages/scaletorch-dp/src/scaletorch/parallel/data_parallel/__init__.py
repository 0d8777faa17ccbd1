"""Data parallelism: gradients summed over ranks in buckets, under one loss rule."""

from ._version import __version__
from .bucket import Bucket, BucketManager
from .data_parallel import DataParallelBucket, DataParallelNaive
from .loss import global_token_count, global_token_mean
from .shards import Shard, parameter_shards

__all__ = [
    "Bucket",
    "BucketManager",
    "DataParallelBucket",
    "DataParallelNaive",
    "Shard",
    "__version__",
    "global_token_count",
    "global_token_mean",
    "parameter_shards",
]
