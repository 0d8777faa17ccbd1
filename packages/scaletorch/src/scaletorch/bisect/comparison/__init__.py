"""Comparison of two recordings: places of shards, full tensors, bounds, and births of faults."""
