"""When each action of a schedule runs: as predicted, or as measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .schedule import Action, Schedule


class Span(NamedTuple):
    """One action on its rank, in any one unit of time."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All actions of a step with their times.

    Attributes:
        schedule: What was run.
        spans: Its actions, each rank's in its order.
        unit: Name of the unit of time, for pictures.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    unit: str = ""

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max(s.end for s in self.spans) - min(s.start for s in self.spans)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they compute nothing, 0 to 1."""
        busy = sum(s.end - s.start for s in self.spans)
        return 1 - busy / (self.makespan * self.schedule.num_ranks)
