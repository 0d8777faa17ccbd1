"""The most that any rank of a layout holds, of which a search asks more often than of all ranks.

A rank's bytes are those of its state, which go by the grid and ZeRO, and those of micro-batches
under way, which go by the cut, recomputation and the schedule. Each sum is worked out once, for
those ranks and moments alone that may be the fullest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import add

from ..holding import Holdings
from ..holding.brought import brought
from ..holding.live import Counts, outer
from ..layout import Layout, Recompute
from .busy import Busy, Moment, Pipeline, busy, pipeline_of
from .running import Action
from .state import state
from .weights import Told, fullest, told


def peak(known: Holdings, layout: Layout) -> int:
    """Return the largest total of `memory`."""
    return peaks_of(known, layout)(layout.recompute, layout.zero)


def peaks_of(known: Holdings, layout: Layout) -> Callable[[Recompute, int], int]:
    """Return `peak` of a layout by recomputation and stage of ZeRO."""
    pipeline = pipeline_of(known, layout)
    held: dict[int, list[int]] = {}
    moving: dict[str, list[int]] = {}

    def at(recompute: Recompute, zero: int) -> int:
        if zero not in held:
            held[zero] = _held(known, layout, zero, pipeline)
        if recompute not in moving:
            own = layout if recompute == layout.recompute else replace(layout, recompute=recompute)
            moving[recompute] = _moving(known, own, pipeline)
        most: int = max(map(add, held[zero], moving[recompute]))
        return most

    return at


def _held(known: Holdings, layout: Layout, zero: int, pipeline: Pipeline) -> list[int]:
    """Return what there is before a step on those ranks that `_telling` names."""
    grid = layout.grid
    key = grid.tp, grid.ep, grid.etp, grid.cp * grid.dp, zero, pipeline
    found: list[int] | None = known.peaks.get(key)
    if found is None:
        own = replace(layout, zero=zero)
        found = known.peaks[key] = [
            sum(state(known, own, each.number, halves=each.halves))
            - (sum(brought(known, layout, each.number).flags) if pipeline[-1] else 0)
            for each in _telling(known, layout, pipeline)
        ]
    return found


def _moving(known: Holdings, layout: Layout, pipeline: Pipeline) -> list[int]:
    """Return what micro-batches need on the same ranks."""
    bringing = pipeline[-1]
    key = layout.cut, layout.recompute, layout.micro_rows, pipeline, bringing and layout.grid.etp
    found: list[int] | None = known.peaks.get(key)
    if found is None:
        ranks = [
            (each, brought(known, layout, each.number) if bringing else None)
            for each in _telling(known, layout, pipeline)
        ]
        found = known.peaks[key] = fullest(known, layout, ranks)
    return found


def _telling(known: Holdings, layout: Layout, pipeline: Pipeline) -> list[Told]:
    """Return ranks with the same blocks as one, at moments of which no other may have more."""
    offloaded = layout.recompute == "offload"
    found: list[Told] | None = known.peaks.get((offloaded, pipeline))
    if found is None:
        each: dict[tuple[int, tuple[bool, ...]], dict[Action, dict[Counts, Moment]]] = {}
        for number, halves, moments in busy(known, layout).each:
            own = each.setdefault((number, halves), {})
            for moment in moments:
                own.setdefault(moment.action, {})[*moment.counts, *moment.made] = moment
        ranks = [
            Busy(*key, tuple(all_[counts] for all_ in own.values() for counts in outer(all_)))
            for key, own in each.items()
        ]
        found = [told(known, rank, offloaded=offloaded) for rank in ranks]
        known.peaks[offloaded, pipeline] = found
    return found
