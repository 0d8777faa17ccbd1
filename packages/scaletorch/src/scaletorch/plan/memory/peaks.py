"""The most that any rank of a layout holds, of which a search asks more often than of all ranks.

A rank's bytes are those of its state, which go by the grid and ZeRO, and those of micro-batches
under way, which go by the cut, recomputation and the schedule. Each sum is worked out once, for
those ranks alone that may be the fullest.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import ge

from ..holding import Holdings
from ..holding.live import Live, enough, fullest, most_live
from ..layout import Layout
from .ranks import state
from .running import running

Pipeline = tuple[str, int, int, int]


def peak(known: Holdings, layout: Layout) -> int:
    """Return the largest total of `memory`."""
    schedule, pp, chunks = layout.schedule, layout.grid.pp, layout.chunks
    pipeline = schedule, pp, chunks, enough(schedule, pp, layout.micro_batches, chunks)
    held, moving = _held(known, layout, pipeline), _moving(known, layout, pipeline)
    return max([a + b for a, b in zip(held, moving, strict=True)])


def _held(known: Holdings, layout: Layout, pipeline: Pipeline) -> list[int]:
    """Return what there is before a step on those ranks that `_telling` names."""
    grid = layout.grid
    key = grid.tp, grid.ep, grid.etp, grid.cp * grid.dp, layout.zero, pipeline
    found: list[int] | None = known.peaks.get(key)
    if found is None:
        ranks = _telling(known, layout, pipeline)
        found = known.peaks[key] = [sum(state(known, layout, number)) for number, _ in ranks]
    return found


def _moving(known: Holdings, layout: Layout, pipeline: Pipeline) -> list[int]:
    """Return what micro-batches need on the same ranks."""
    key = layout.cut, layout.recompute, layout.micro_rows, pipeline
    found: list[int] | None = known.peaks.get(key)
    if found is None:
        ran = running(known, layout)
        found = known.peaks[key] = [
            own.working + own.messages + fullest(live, own.kept) + fullest(live, own.passed)
            for own, live in (
                (ran[number], live) for number, live in _telling(known, layout, pipeline)
            )
        ]
    return found


def _telling(known: Holdings, layout: Layout, pipeline: Pipeline) -> list[tuple[int, Live]]:
    """Return numbers of ranks with what is alive there, without those of which another has more."""
    found: list[tuple[int, Live]] | None = known.peaks.get(pipeline)
    if found is None:
        each = {*zip(known.numbers(layout), _lives(pipeline), strict=True)}
        found = known.peaks[pipeline] = []
        for number, live in sorted(each, key=lambda one: max(map(sum, one[1])), reverse=True):
            if not any(number == other and _covers(more, live) for other, more in found):
                found.append((number, live))
    return found


def _lives(pipeline: Pipeline) -> tuple[Live, ...]:
    schedule, pp, chunks, micro_batches = pipeline
    return most_live(schedule, pp, micro_batches, chunks)


def _covers(more: Live, less: Live) -> bool:
    """Return whether for each moment of one there is one of the other that has as much of all."""
    return all(any(_as_much(a, b) for a in more) for b in less)


def _as_much(more: Sequence[int], less: Sequence[int]) -> bool:
    return all(map(ge, more, less))
