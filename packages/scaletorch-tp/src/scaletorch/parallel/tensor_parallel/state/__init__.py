"""Full tensors from shards and back; checkpoints."""
