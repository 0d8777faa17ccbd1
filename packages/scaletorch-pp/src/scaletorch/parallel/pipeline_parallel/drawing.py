"""Pictures of timelines in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...dist.errors import InvalidArgumentError
from .schedules.schedule import Action, Timeline

__all__ = ["to_text"]

WIDTH = 200  # columns at most if no width is given


def to_text(
    timeline: Timeline,
    width: int | None = None,
    *,
    peak: Sequence[float] | None = None,
) -> str:
    """Return a picture with a line for each rank, and the makespan and bubble below.

    Every column is the same fraction of the makespan. Dots are idle time, and an action without
    room for its number shows only its kind. A rank's second stage is in lower case; later ones are
    `F0.2`, `F0.3` and so on.

    Args:
        timeline: The times of a step's actions.
        width: Columns of the longest line; None takes as many as the shortest action needs for its
            number, but at most 200.
        peak: Peak live activations of each rank, shown below.

    Raises:
        InvalidArgumentError: The actions take no time, or `width` leaves no room for them.
    """
    name, spans = timeline.schedule.name, timeline.spans
    shortest = min((s.end - s.start for s in spans if s.end > s.start), default=0)
    if not shortest:
        raise InvalidArgumentError(f"nothing to draw: the actions of {name!r} take no time")
    digits = len(str(timeline.schedule.num_ranks - 1))
    margin = len("rank   ") + digits
    if width is None:
        needed = max(len(_label(s.action)) for s in spans) + 1
        width = min(margin + round(timeline.makespan / shortest * needed), WIDTH)
    if width <= margin:
        raise InvalidArgumentError(f"a picture needs a width of at least {margin + 1}, got {width}")
    unit = timeline.makespan / (width - margin)
    lines = [
        f"rank {rank:<{digits}}  {''.join(_line(timeline, rank, unit)).rstrip()}"
        for rank in range(timeline.schedule.num_ranks)
    ]
    makespan = f"{timeline.makespan:.6g} {timeline.unit}".rstrip()
    lines += ["", f"{name}: makespan {makespan}, bubble {100 * timeline.bubble:.1f} %"]
    if any(s.action.chunk for s in spans):
        lines.append("in lower case: each rank's second stage")
    if peak is not None:
        lines.append(f"peak live activations: {' '.join(f'{p:g}' for p in peak)}")
    return "\n".join(lines)


def _line(timeline: Timeline, rank: int, unit: float) -> Iterator[str]:
    """Yield the text of each action of a rank, and of the idle times between actions."""
    begin, column = min(s.start for s in timeline.spans), 0
    for span in sorted((s for s in timeline.spans if s.rank == rank), key=lambda s: s.start):
        first, last = (round((time - begin) / unit) for time in (span.start, span.end))
        first = max(first, column)
        if last > first:
            label, room = _label(span.action), last - first
            label = label if len(label) <= room else label[0]
            yield "." * (first - column)
            yield label if len(label) == room else label.ljust(room - 1, "-") + " "
            column = last
    yield "." * (round(timeline.makespan / unit) - column)


def _label(action: Action) -> str:
    label = f"{action.kind}{action.micro_batch}"
    return label if not action.chunk else label.lower() if action.chunk == 1 else str(action)
