"""What a stage has to know of layers that were put in place of others after the cut."""

from __future__ import annotations

from ..schedules.choose import stages_of
from .stage import PipelineParallel
from .weights import defer_weight_gradients


def adopt(stage: PipelineParallel) -> None:
    """Take note of a stage's new layers, and of what was frozen on all ranks, between two steps."""
    if stages_of(stage.schedule, len(stage.ranks))[1]:
        defer_weight_gradients(stage.module, stage.runtime.deferral)
    stage.runtime.tied.forget_frozen()
