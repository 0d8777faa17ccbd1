"""Bytes on the ranks of a layout: what a plan says of them."""

from .closed import before, chunks_of, memory, peak

__all__ = ["before", "chunks_of", "memory", "peak"]
