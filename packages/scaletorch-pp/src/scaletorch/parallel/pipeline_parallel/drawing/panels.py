"""What all pictures share: timelines in one unit of time, their titles and their colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....dist.errors import InvalidArgumentError
from ..schedules.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Schedule,
)
from ..schedules.timeline import Timeline

KIND_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward of inputs",
    BACKWARD_WEIGHT: "backward of weights",
}
# Paul Tol's bright scheme: told apart by colour-blind readers too.
_COLOURS = {
    FORWARD: (0x44, 0x77, 0xAA),
    BACKWARD: (0x22, 0x88, 0x33),
    BACKWARD_INPUT: (0x66, 0xCC, 0xEE),
    BACKWARD_WEIGHT: (0xCC, 0xBB, 0x44),
}
_PALEST = 0.6  # share of white in the last chunk


@dataclass(frozen=True)
class Box:
    """One action as drawn, in the unit of the common axis."""

    rank: int
    action: Action
    start: float
    end: float
    stage: int
    fill: str
    ink: str


@dataclass(frozen=True)
class Panel:
    """One timeline as drawn."""

    title: str
    num_ranks: int
    boxes: tuple[Box, ...]
    end: float


def panels(timelines: Sequence[Timeline], titles: Sequence[str]) -> tuple[Panel, ...]:
    """Return the timelines in the first one's unit of time, each from 0.

    Where another has another unit, it is scaled until all its actions together take as long as
    the first one's, so that what differs is the time between them.

    Args:
        timelines: At least one.
        titles: One for each; none for the names of the schedules.

    Raises:
        InvalidArgumentError: No timeline, one without time, or not one title for each.
    """
    names = named(timelines, titles)
    first = timelines[0]
    scales = [1.0 if t.unit == first.unit else busy(first) / busy(t) for t in timelines]
    return tuple(map(_panel, timelines, names, scales))


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


def legend(shown: Sequence[Panel]) -> list[tuple[str, str]]:
    """Return the fill and the name of each kind and chunk that is drawn."""
    boxes = [box for panel in shown for box in panel.boxes]
    several = any(box.action.chunk for box in boxes)
    found = {}
    for box in boxes:
        kind, chunk = box.action.kind, box.action.chunk
        name = f"{kind} {KIND_NAMES[kind]}" + (f", chunk {chunk}" if several else "")
        found[list(KIND_NAMES).index(kind), chunk, box.fill] = name
    return [(fill, found[kind, chunk, fill]) for kind, chunk, fill in sorted(found)]


def _panel(timeline: Timeline, name: str, scale: float) -> Panel:
    schedule, first = timeline.schedule, min(s.start for s in timeline.spans)
    chunks = num_chunks(schedule)
    boxes = tuple(
        Box(
            span.rank,
            span.action,
            (span.start - first) * scale,
            (span.end - first) * scale,
            schedule.stages[span.rank][span.action.chunk],
            *_colours(span.action, chunks),
        )
        for span in timeline.spans
    )
    title = f"{name}: {figures(timeline)}"
    if scale != 1:
        title += f" (1 on the axis is {with_unit(1 / scale, timeline.unit)})"
    return Panel(title, schedule.num_ranks, boxes, timeline.makespan * scale)


def _colours(action: Action, chunks: int) -> tuple[str, str]:
    """Return fill and ink; later chunks are paler."""
    white = _PALEST * action.chunk / max(chunks - 1, 1)
    red, green, blue = (round(c + (255 - c) * white) for c in _COLOURS[action.kind])
    ink = "#000000" if 0.3 * red + 0.59 * green + 0.11 * blue > 130 else "#ffffff"
    return f"#{red:02x}{green:02x}{blue:02x}", ink
