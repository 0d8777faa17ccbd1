"""Buckets of gradients, by the names that other code imports."""

from .buckets.bucket import Bucket
from .buckets.manager import BucketManager

__all__ = ["Bucket", "BucketManager"]
