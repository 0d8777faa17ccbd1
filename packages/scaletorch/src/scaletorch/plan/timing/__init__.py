"""The time of a step: computing, messages, the pipeline, gradients and update."""

from .step import Steps, time, timeline

__all__ = ["Steps", "time", "timeline"]
