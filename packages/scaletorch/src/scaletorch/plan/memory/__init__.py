"""Bytes on the ranks of a layout: what a plan says, line by line, and what a rank really holds."""

from .explaining import Line, lines
from .peaks import Bounds, Peaks, exactly, known_to_be, peak
from .ranks import kept_by_autograd, memory, ranks_hold, summed_gradients

__all__ = [
    "Bounds",
    "Line",
    "Peaks",
    "exactly",
    "kept_by_autograd",
    "known_to_be",
    "lines",
    "memory",
    "peak",
    "ranks_hold",
    "summed_gradients",
]
