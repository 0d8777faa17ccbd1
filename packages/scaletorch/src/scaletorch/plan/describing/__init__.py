"""Describe a model by running it on hollow tensors: without its memory and without ranks."""

from .describe import built, describe, usual_cuts

__all__ = ["built", "describe", "usual_cuts"]
