"""Data parallelism: gradients summed over ranks in buckets, under one loss rule."""

from ._version import __version__
from .bucket import Bucket, BucketManager
from .data_parallel import DataParallelBucket, DataParallelNaive
from .loss import global_token_count, global_token_mean

__all__ = [
    "Bucket",
    "BucketManager",
    "DataParallelBucket",
    "DataParallelNaive",
    "__version__",
    "global_token_count",
    "global_token_mean",
]
