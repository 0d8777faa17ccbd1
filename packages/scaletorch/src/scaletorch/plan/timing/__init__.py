"""How long a step takes: computing, messages, the pipeline, gradients and update."""

from .step import Timers, time, timeline, timer, timers

__all__ = ["Timers", "time", "timeline", "timer", "timers"]
