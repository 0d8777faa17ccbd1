"""Layers of which each rank holds one shard."""
