"""The most that any rank of a layout holds, of which a search asks more often than of all ranks.

A rank's bytes are those of its state, which go by the grid and ZeRO, and those of micro-batches
under way, which go by the cut, recomputation and the schedule. Each sum is worked out once, for
those ranks and moments alone that may be the fullest.
"""

from __future__ import annotations

from ..holding import Holdings
from ..layout import Layout
from .busy import Busy, Counts, Moment, Pipeline, busy, outer, pipeline_of
from .ranks import fullest_moment
from .running import Action, running
from .state import state


def peak(known: Holdings, layout: Layout) -> int:
    """Return the largest total of `memory`."""
    pipeline = pipeline_of(layout)
    held, moving = _held(known, layout, pipeline), _moving(known, layout, pipeline)
    return max([a + b for a, b in zip(held, moving, strict=True)])


def _held(known: Holdings, layout: Layout, pipeline: Pipeline) -> list[int]:
    """Return what there is before a step on those ranks that `_telling` names."""
    grid = layout.grid
    key = grid.tp, grid.ep, grid.etp, grid.cp * grid.dp, layout.zero, pipeline
    found: list[int] | None = known.peaks.get(key)
    if found is None:
        found = known.peaks[key] = [
            sum(state(known, layout, each.number, halves=each.halves))
            for each in _telling(known, layout, pipeline)
        ]
    return found


def _moving(known: Holdings, layout: Layout, pipeline: Pipeline) -> list[int]:
    """Return what micro-batches need on the same ranks."""
    key = layout.cut, layout.recompute, layout.micro_rows, pipeline
    found: list[int] | None = known.peaks.get(key)
    if found is None:
        ran = running(known, layout)
        found = known.peaks[key] = [
            fullest_moment(ran[each.number], each.moments)[0]
            for each in _telling(known, layout, pipeline)
        ]
    return found


def _telling(known: Holdings, layout: Layout, pipeline: Pipeline) -> list[Busy]:
    """Return ranks with the same blocks as one, at moments of which no other may have more."""
    found: list[Busy] | None = known.peaks.get(pipeline)
    if found is None:
        each: dict[tuple[int, tuple[bool, ...]], dict[Action, dict[Counts, Moment]]] = {}
        for number, halves, moments in busy(known, layout).each:
            own = each.setdefault((number, halves), {})
            for moment in moments:
                own.setdefault(moment.action, {})[moment.counts] = moment
        found = known.peaks[pipeline] = [
            Busy(*key, tuple(all_[counts] for all_ in own.values() for counts in outer(all_)))
            for key, own in each.items()
        ]
    return found
