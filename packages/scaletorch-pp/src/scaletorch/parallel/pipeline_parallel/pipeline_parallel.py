"""The public module of pipeline parallelism: the wrapper and its train steps."""

from .stages.stage import PipelineParallel
from .steps.training import (
    train_step_pipeline,
    train_step_pipeline_1f1b,
    train_step_pipeline_afab,
)

__all__ = [
    "PipelineParallel",
    "train_step_pipeline",
    "train_step_pipeline_1f1b",
    "train_step_pipeline_afab",
]
