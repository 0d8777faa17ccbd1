"""How long a step takes: computing, messages, the pipeline, gradients and update."""

from .step import Steps, steps_of, time, timeline, timer

__all__ = ["Steps", "steps_of", "time", "timeline", "timer"]
