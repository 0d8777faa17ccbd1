"""The files of a checkpoint: folders, locks, tensors, description and plain values."""
