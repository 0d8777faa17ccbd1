"""Buckets of gradients, under their documented import path."""

from .buckets.bucket import Bucket
from .buckets.manager import BucketManager

__all__ = ["Bucket", "BucketManager"]
