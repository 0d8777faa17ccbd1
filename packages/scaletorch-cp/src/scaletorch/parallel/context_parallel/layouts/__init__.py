"""Sequence layouts, and the shards of tensors and batches under a layout."""
