"""The time of a step: computing, messages, the pipeline, gradients and update."""

from .step import Steps, time

__all__ = ["Steps", "time"]
