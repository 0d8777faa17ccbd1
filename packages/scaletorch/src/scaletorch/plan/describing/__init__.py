"""Describing a model by running it hollow: no memory of its size, no ranks."""

from .describe import describe, usual_cuts
from .named import experts_of, named

__all__ = ["describe", "experts_of", "named", "usual_cuts"]
