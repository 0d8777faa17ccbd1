"""Layers that are sharded over the tensor-parallel ranks."""
