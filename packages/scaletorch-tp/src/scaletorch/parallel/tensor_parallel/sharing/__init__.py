"""Sequence parallelism, gradient sums over the ranks, and adapters."""
