"""Timelines as a Chrome trace, which Perfetto (https://ui.perfetto.dev) opens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..schedules.schedule import Timeline
from .figures import busy, figures, named

MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
PREDICTED = 1e3  # microseconds of a unit, if nothing was measured


def to_chrome_trace(*timelines: Timeline, titles: Sequence[str] = ()) -> str:
    """Return JSON of the Chrome trace event format: a process for each timeline, a thread a rank.

    Times are microseconds from each timeline's own first action. A unit that is no unit of time
    (neither s, ms, us nor ns) is a millisecond; but beside a measured timeline, it is as long as
    makes the actions of both take equally long together.

    Args:
        timelines: Predicted or measured, at least one.
        titles: One for each; none for the names of the schedules.

    Raises:
        InvalidArgumentError: No timeline, one without time, or not one title for each.
    """
    names = named(timelines, titles)
    events: list[dict[str, Any]] = []
    for process, (timeline, name) in enumerate(zip(timelines, names, strict=True)):
        events += _names(process, timeline, name)
        events += _actions(process, timeline, _microseconds(timeline, timelines))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _microseconds(timeline: Timeline, timelines: Sequence[Timeline]) -> float:
    """Return how many microseconds one unit of the timeline is."""
    if timeline.unit in MICROSECONDS:
        return MICROSECONDS[timeline.unit]
    measured = next((t for t in timelines if t.unit in MICROSECONDS), None)
    if measured is None:
        return PREDICTED
    return MICROSECONDS[measured.unit] * busy(measured) / busy(timeline)


def _names(process: int, timeline: Timeline, name: str) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", process, 0, name=name)
    yield _meta("process_labels", process, 0, labels=figures(timeline))
    yield _meta("process_sort_index", process, 0, sort_index=process)
    for rank in range(timeline.schedule.num_ranks):
        yield _meta("thread_name", process, rank, name=f"rank {rank}")
        yield _meta("thread_sort_index", process, rank, sort_index=rank)


def _meta(what: str, process: int, thread: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _actions(process: int, timeline: Timeline, scale: float) -> Iterator[dict[str, Any]]:
    first = min(s.start for s in timeline.spans)
    for rank, action, start, end in timeline.spans:
        stage = timeline.schedule.stages[rank][action.chunk]
        yield {
            "ph": "X",
            "name": str(action),
            "cat": "pipeline",
            "pid": process,
            "tid": rank,
            "ts": (start - first) * scale,
            "dur": (end - start) * scale,
            "args": {**action._asdict(), "stage": stage},
        }
