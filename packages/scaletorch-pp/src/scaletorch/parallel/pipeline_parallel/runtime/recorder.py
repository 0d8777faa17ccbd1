"""Times of a real step, action by action: a timeline beside the predicted one."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup

from ....dist import all_gather_object, barrier
from ....dist.errors import StateError
from ...pg_manager import describe_rank
from ..schedules.schedule import Action, Schedule
from ..schedules.timeline import Span, Timeline
from .execute import Task


class Recorder:
    """Notes when each action of a train step begins and ends on this rank.

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
        """Return what notes its times; the last step that was watched counts."""
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


def _now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
