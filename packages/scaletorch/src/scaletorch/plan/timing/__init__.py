"""How long a step takes: computing, messages, the pipeline, gradients and update."""

from .step import time, timeline, timer

__all__ = ["time", "timeline", "timer"]
