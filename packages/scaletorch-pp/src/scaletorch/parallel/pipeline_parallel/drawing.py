"""Pictures of timelines in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...dist.errors import InvalidArgumentError
from .schedules.schedule import Action, Span, Timeline

__all__ = ["to_text"]

WIDTH = 120  # columns, if times have no common unit and no width is given
_CLOSE = 1e-6  # of a unit: tolerance for the rounding of floats


@dataclass(frozen=True)
class _Scale:
    """The time scale of a picture: `cell` columns for each `unit` of time, from `start`."""

    start: float
    unit: float
    cell: int
    chunks: int

    def column(self, time: float) -> int:
        return round((time - self.start) / self.unit * self.cell)


def to_text(
    timeline: Timeline,
    width: int | None = None,
    *,
    peak: Sequence[float] | None = None,
) -> str:
    """Return a picture with a line for each rank, and the makespan and bubble below.

    If all times are multiples of one unit, each unit is a cell: `F0` takes one, `B0---` two, and
    `..` is idle. Otherwise, or if that is wider than `width`, each column is the same fraction of
    the makespan, and an action without room for its number shows only its kind. With two chunks the
    second is in lower case; with more, the later ones are `F0.1`, `F0.2` and so on.

    Args:
        timeline: The times of a step's actions.
        width: Columns of the longest line; None takes as many as the cells need, or 120.
        peak: Peak live activations of each rank, shown below.

    Raises:
        InvalidArgumentError: The actions take no time, or `width` leaves no room for them.
    """
    if not sum(s.end - s.start for s in timeline.spans) > 0:
        raise InvalidArgumentError(
            f"nothing to draw: the actions of {timeline.schedule.name!r} take no time"
        )
    num_ranks = timeline.schedule.num_ranks
    names = [f"rank {rank:<{len(str(num_ranks - 1))}}  " for rank in range(num_ranks)]
    scale = _scale(timeline, width, len(names[0]))
    lines = [
        name + "".join(_line(timeline, rank, scale)).rstrip() for rank, name in enumerate(names)
    ]
    return "\n".join([*lines, "", *_below(timeline, scale, peak)])


def _common_unit(timeline: Timeline) -> float | None:
    """Return a unit that divides all times (1, 1/2, 1/3 or 1/4 of the shortest action), or None."""
    start = min(s.start for s in timeline.spans)
    times = {t - start for s in timeline.spans for t in (s.start, s.end)}
    shortest = min(s.end - s.start for s in timeline.spans if s.end > s.start)
    for divisor in range(1, 5):
        unit = shortest / divisor
        if all(abs(t / unit - round(t / unit)) < _CLOSE for t in times):
            return unit
    return None


def _scale(timeline: Timeline, width: int | None, margin: int) -> _Scale:
    start = min(s.start for s in timeline.spans)
    chunks = max(map(len, timeline.schedule.stages))
    unit = _common_unit(timeline)
    if unit is not None:
        cell = max(len(_label(s.action, chunks)) for s in timeline.spans) + 1
        columns = round(timeline.makespan / unit) * cell - 1
        if width is None or margin + columns <= width:
            return _Scale(start, unit, cell, chunks)
    width = WIDTH if width is None else width
    if width <= margin:
        raise InvalidArgumentError(f"a picture needs a width of at least {margin + 1}, got {width}")
    return _Scale(start, timeline.makespan / (width - margin), 1, chunks)


def _line(timeline: Timeline, rank: int, scale: _Scale) -> Iterator[str]:
    """Yield the text of each action of a rank, and of the idle times between actions."""
    column = 0
    spans = sorted((s for s in timeline.spans if s.rank == rank), key=lambda s: s.start)
    for span in spans:
        first, last = max(scale.column(span.start), column), scale.column(span.end)
        if last > first:
            yield _idle(first - column, scale.cell)
            yield _action(span, last - first, scale)
            column = last
    yield _idle(scale.column(timeline.makespan + scale.start) - column, scale.cell)


def _idle(columns: int, cell: int) -> str:
    return "." * columns if cell == 1 else ("." * (cell - 1) + " ") * (columns // cell)


def _action(span: Span, columns: int, scale: _Scale) -> str:
    label, gap = _label(span.action, scale.chunks), min(scale.cell - 1, 1)
    if len(label) > columns - gap:
        label = label[0]
    return label.ljust(columns - gap, "-" if columns > scale.cell else " ") + " " * gap


def _label(action: Action, chunks: int) -> str:
    if chunks != 2:
        return str(action)
    label = f"{action.kind}{action.micro_batch}"
    return label.lower() if action.chunk else label


def _below(timeline: Timeline, scale: _Scale, peak: Sequence[float] | None) -> Iterator[str]:
    makespan = _with_unit(timeline.makespan, timeline.unit)
    yield f"{timeline.schedule.name}: makespan {makespan}, bubble {100 * timeline.bubble:.1f} %"
    if scale.cell == 1:
        yield f"one column is {_with_unit(scale.unit, timeline.unit)}"
    if scale.chunks == 2:
        yield "in lower case: each rank's second stage"
    elif scale.chunks > 2:
        yield "F0.1: on the second of each rank's stages, F0.2: on the third, and so on"
    if peak is not None:
        yield f"peak live activations: {' '.join(f'{p:g}' for p in peak)}"


def _with_unit(value: float, unit: str) -> str:
    """Return a time with its unit as text."""
    return f"{value:.6g} {unit}".rstrip()
