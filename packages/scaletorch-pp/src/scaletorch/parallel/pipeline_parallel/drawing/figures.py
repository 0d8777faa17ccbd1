"""The basis of all pictures: titles, how actions look, and makespan, bubble and times in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....dist.errors import InvalidArgumentError
from ..schedules.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Schedule,
    Timeline,
)


class Look(NamedTuple):
    """How actions of a kind look.

    Attributes:
        name: What they are, in words.
        colour: Red, green and blue.
        code: The terminal's.
    """

    name: str
    colour: tuple[int, int, int]
    code: str


# Paul Tol's bright scheme: told apart by colour-blind readers too.
LOOKS = {
    FORWARD: Look("forward", (0x44, 0x77, 0xAA), "7;34"),
    BACKWARD: Look("backward", (0x22, 0x88, 0x33), "7;32"),
    BACKWARD_INPUT: Look("backward of inputs", (0x66, 0xCC, 0xEE), "7;36"),
    BACKWARD_WEIGHT: Look("backward of weights", (0xCC, 0xBB, 0x44), "7;33"),
}


def named(timelines: Sequence[Timeline], titles: Sequence[str]) -> Sequence[str]:
    """Return the titles, or the names of the schedules, when all timelines can be drawn.

    Raises:
        InvalidArgumentError: No timeline, one without time, or not one title for each.
    """
    if not timelines:
        raise InvalidArgumentError("nothing to draw: give at least one timeline")
    for timeline in timelines:
        busy(timeline)
    if titles and len(titles) != len(timelines):
        raise InvalidArgumentError(
            f"expected one title for each of {len(timelines)} timelines, got {len(titles)}"
        )
    return titles or [t.schedule.name for t in timelines]


def busy(timeline: Timeline) -> float:
    """Return the time of all actions together.

    Raises:
        InvalidArgumentError: They take no time.
    """
    total = sum(s.end - s.start for s in timeline.spans)
    if not total > 0:
        raise InvalidArgumentError(
            f"nothing to draw: the actions of {timeline.schedule.name!r} take no time"
        )
    return total


def figures(timeline: Timeline) -> str:
    """Return makespan and bubble in words."""
    makespan = with_unit(timeline.makespan, timeline.unit)
    return f"makespan {makespan}, bubble {100 * timeline.bubble:.1f} %"


def with_unit(value: float, unit: str) -> str:
    """Return a time in words."""
    return f"{value:.6g} {unit}".rstrip()


def num_chunks(schedule: Schedule) -> int:
    """Return how many stages the rank with most has."""
    return max(map(len, schedule.stages))
