"""Recording the train steps of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ....dist.errors import StateError
from ...pg_manager import describe_rank
from ..runtime.recorder import Recorder
from ..stages.stage import PipelineParallel
from .step import unwrap


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Record the train steps of a pipeline for as long as this lasts, on every rank alike.

    Args:
        model: A `PipelineParallel`, or wrappers around one.

    Yields:
        What tells the `timeline` of the last step.

    Raises:
        InvalidArgumentError: No `PipelineParallel` beneath `model`.
        StateError: It is being recorded already.

    Example:
        >>> with recording(stage) as recorder:
        ...     train_step_pipeline_1f1b(stage, micro_batches, shape, "cpu", torch.float32)
        >>> print(to_text(recorder.timeline(), 120))
    """
    pipeline: PipelineParallel = unwrap(model)[1]
    if pipeline.recorder is not None:
        raise StateError(f"{describe_rank()}: this pipeline is being recorded already")
    pipeline.recorder = Recorder(pipeline.group, pipeline.rank)
    try:
        yield pipeline.recorder
    finally:
        pipeline.recorder = None
