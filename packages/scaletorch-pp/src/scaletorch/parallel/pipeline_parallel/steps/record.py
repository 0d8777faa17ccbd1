"""Times of a real step, action by action: a timeline beside the predicted one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ....dist import all_gather_object, barrier
from ....dist.errors import StateError
from ...pg_manager import describe_rank
from ..runtime.program import Task
from ..schedules.schedule import Action, Schedule, Span, Timeline
from .work import unwrap


class Recorder:
    """Notes the times at which each action of a train step begins and ends on this rank.

    Ranks start their clocks at a barrier. On other devices than CPU each action is waited for, so
    that its time is its own; nothing overlaps then.
    """

    def __init__(self, group: ProcessGroup | None, rank: int) -> None:
        """Begin with no step.

        Args:
            group: The stages.
            rank: This rank's place in them.
        """
        self._group, self._rank = group, rank
        self._schedule: Schedule | None = None
        self._spans: list[Span] = []

    def watch(self, schedule: Schedule, perform: Callable[[Task], None]) -> Callable[[Task], None]:
        """Return a function that performs a task and notes its times; the last step counts."""
        self._schedule, self._spans = schedule, []
        barrier(self._group)
        zero = time.perf_counter()

        def timed(task: Task) -> None:
            start = _now()
            perform(task)
            self._spans.append(Span(self._rank, task.action, start - zero, _now() - zero))

        return timed

    def timeline(self) -> Timeline:
        """Return the last step of all ranks, in seconds; every rank calls it.

        Raises:
            StateError: No step has run since.
        """
        if self._schedule is None:
            raise StateError(f"{describe_rank()}: no train step has run while it was recorded")
        plain = [(rank, tuple(action), *times) for rank, action, *times in self._spans]
        every = [each for spans in all_gather_object(plain, self._group) for each in spans]
        spans = (Span(rank, Action(*action), *times) for rank, action, *times in every)
        return Timeline(self._schedule, tuple(spans), "s")


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Record the train steps of a pipeline while the context lasts, on every rank.

    Args:
        model: A `PipelineParallel`, or wrappers around one.

    Yields:
        The recorder, which has the `timeline` of the last step.

    Raises:
        InvalidArgumentError: No `PipelineParallel` beneath `model`.
        StateError: It is being recorded already.

    Example:
        >>> with recording(stage) as recorder:
        ...     train_step_pipeline_1f1b(stage, micro_batches, shape, "cpu", torch.float32)
        >>> print(to_text(recorder.timeline(), 120))
    """
    pipeline = unwrap(model)[1]
    if pipeline.runtime.timed is not None:
        raise StateError(f"{describe_rank()}: this pipeline is being recorded already")
    recorder = Recorder(pipeline.group, pipeline.rank)
    pipeline.runtime.timed = recorder.watch
    try:
        yield recorder
    finally:
        pipeline.runtime.timed = None


def _now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
