"""Bytes on the ranks of a layout: what a plan says, line by line, and what a rank really holds."""

from .explaining import Line, lines
from .peaks import Bounds, exactly, peak, peaks_of
from .ranks import kept_by_autograd, memory, ranks_hold, summed_gradients

__all__ = [
    "Bounds",
    "Line",
    "exactly",
    "kept_by_autograd",
    "lines",
    "memory",
    "peak",
    "peaks_of",
    "ranks_hold",
    "summed_gradients",
]
