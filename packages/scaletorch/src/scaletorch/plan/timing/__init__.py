"""How long a step takes: computing, messages, the pipeline, gradients and update."""

from .step import Steps, time, timeline

__all__ = ["Steps", "time", "timeline"]
