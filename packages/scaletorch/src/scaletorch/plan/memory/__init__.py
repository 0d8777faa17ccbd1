"""Bytes on the ranks of a layout: what a plan says, line by line, and what a rank really holds."""

from .explaining import Line, lines
from .peaks import peak
from .ranks import memory

__all__ = ["Line", "lines", "memory", "peak"]
