"""Describe a model by running it on hollow tensors: without its memory and without ranks."""

from .describe import describe, model_named, usual_cuts

__all__ = ["describe", "model_named", "usual_cuts"]
