"""Describe a model by running it on hollow tensors: without its memory and without ranks."""

from .describe import describe, usual_cuts
from .named import experts_of, named

__all__ = ["describe", "experts_of", "named", "usual_cuts"]
