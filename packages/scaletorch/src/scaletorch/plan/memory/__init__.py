"""Bytes on the ranks of a layout: what a plan says, and what a rank really holds."""

from .closed import Line, before, kept_by_autograd, lines, memory, peak, summed_gradients

__all__ = [
    "Line",
    "before",
    "kept_by_autograd",
    "lines",
    "memory",
    "peak",
    "summed_gradients",
]
