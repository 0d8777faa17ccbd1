"""Bytes on the ranks of a layout: what a plan says of them."""

from .closed import Line, before, chunks_of, lines, memory, peak

__all__ = ["Line", "before", "chunks_of", "lines", "memory", "peak"]
