"""Schedules as data: the ordered actions and the stages of each rank, and timelines.

A schedule lists each rank's computations in order; messages are derived from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

FORWARD = "F"
BACKWARD = "B"  # gradients of both inputs and weights
BACKWARD_INPUT = "I"
BACKWARD_WEIGHT = "W"
KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


class Action(NamedTuple):
    """One computation of a rank.

    Attributes:
        kind: "F" forward, "B" backward, or the two halves of a backward, "I" for the gradient of
            the inputs and "W" for the gradients of the weights.
        micro_batch: Its micro-batch, from 0.
        chunk: The index of its stage among the rank's stages, from 0.
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        """Return text such as `F3`, or `F3.1` for the second chunk."""
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind}{self.micro_batch}{chunk}"


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank of a pipeline in one step, in order.

    Attributes:
        name: Its name.
        num_micro_batches: Number of micro-batches of the step.
        stages: Each rank's stages, chunk by chunk.
        ranks: Each rank's actions.
    """

    name: str
    num_micro_batches: int
    stages: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """The number of stages over all ranks."""
        return sum(map(len, self.stages))

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """The rank and the chunk of each stage."""
        return {
            stage: (rank, chunk)
            for rank, stages in enumerate(self.stages)
            for chunk, stage in enumerate(stages)
        }

    def __str__(self) -> str:
        """Return one line for each rank."""
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)


class Span(NamedTuple):
    """The start and end of one action on its rank, in the timeline's unit."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All actions of a step with their times, predicted or measured.

    Attributes:
        schedule: The schedule that ran.
        spans: The times of its actions, in order for each rank.
        unit: Name of the unit of time, for pictures.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    unit: str = ""

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        return max(s.end for s in self.spans) - min(s.start for s in self.spans)

    @property
    def bubble(self) -> float:
        """The idle fraction of all ranks' time, 0 to 1."""
        busy = sum(s.end - s.start for s in self.spans)
        return 1 - busy / (self.makespan * self.schedule.num_ranks)
