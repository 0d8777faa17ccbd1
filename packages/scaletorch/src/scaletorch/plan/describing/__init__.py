"""Describing a model by running it hollow: no memory of its size, no ranks."""

from .describe import describe, usual_cuts

__all__ = ["describe", "usual_cuts"]
