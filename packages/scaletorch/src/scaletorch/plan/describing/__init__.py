"""Describe a model by running it on hollow tensors: without its memory and without ranks."""

from .describe import describe, usual_cuts
from .named import model_named

__all__ = ["describe", "model_named", "usual_cuts"]
