"""Whole tensors from shards and back; checkpoints."""
