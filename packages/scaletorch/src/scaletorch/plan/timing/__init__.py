"""How long a step takes: computing, messages, the pipeline, gradients and update."""

from .step import time, timer

__all__ = ["time", "timer"]
