"""How long a step takes: computing, messages, the pipeline, gradients and update."""

from .step import Steps, time, timeline, timer

__all__ = ["Steps", "time", "timeline", "timer"]
