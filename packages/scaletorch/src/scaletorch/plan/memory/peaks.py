"""The most that any rank of a layout holds, of which a search asks more often than of all ranks.

A rank's bytes are those of its state, which go by the grid and ZeRO, and those of micro-batches
under way, which go by the cut, recomputation and the schedule. Each sum is worked out once, for
those ranks and moments alone that may be the fullest.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add

from ..holding import Holdings
from ..holding.brought import brought
from ..holding.live import Counts, outer
from ..layout import Layout, Recompute
from .busy import Busy, Moment, Pipeline, busy, pipeline_of
from .state import state
from .weights import Told, fullest, told
from .working import Action


def peak(known: Holdings, layout: Layout) -> int:
    """Return the largest total of `memory`."""
    return peaks_of(known, layout)(layout.recompute, layout.zero)


def peaks_of(known: Holdings, layout: Layout) -> Callable[[Recompute, int], int]:
    """Return `peak` of a layout by recomputation and stage of ZeRO."""
    pipeline, summed = pipeline_of(known, layout), layout.grid.cp * layout.grid.dp > 1
    held: dict[int, list[int]] = {}
    moving: dict[str, list[int]] = {}

    def at(recompute: Recompute, zero: int) -> int:
        if not summed and zero != layout.zero:  # by which goes whether a step brings gradients
            return peak(known, layout.saving(recompute, zero))
        if zero not in held:
            held[zero] = _held(known, layout, zero, pipeline)
        if recompute not in moving:
            own = layout
            if "selective" in (recompute, layout.recompute):
                own = layout.saving(recompute, zero)
            moving[recompute] = _moving(known, own, recompute, pipeline)
        most: int = max(map(add, held[zero], moving[recompute]))
        return most

    return at


def _held(known: Holdings, layout: Layout, zero: int, pipeline: Pipeline) -> list[int]:
    """Return what there is before a step on those ranks that `_telling` names."""
    grid = layout.grid
    key = grid.tp, grid.ep, grid.etp, grid.cp * grid.dp, zero, pipeline
    found: list[int] | None = known.peaks.get(key)
    if found is None:
        own = layout.saving(layout.recompute, zero)
        ranks = _telling(known, layout, pipeline, offloaded=False).ranks
        found = known.peaks[key] = [
            sum(state(known, own, number, halves=halves))
            - (sum(brought(known, own, number).flags) if pipeline[-1] else 0)
            for number, halves in ranks
        ]
    return found


def _moving(known: Holdings, layout: Layout, recompute: Recompute, pipeline: Pipeline) -> list[int]:
    """Return what micro-batches need on the same ranks, and gradients that a step brings.

    Where it brings none, all cuts are summed at once.
    """
    bringing = pipeline[-1]
    key: tuple[object, ...] = recompute, layout.micro_rows, pipeline
    if bringing:
        key = *key, layout.cut, layout.grid.etp
    found: list[list[int]] | None = known.peaks.get(key)
    if found is None:
        ranks = _telling(known, layout, pipeline, offloaded=recompute == "offload")
        numbers = {number for number, _ in ranks.ranks} if bringing else ()
        own = {number: brought(known, layout, number) for number in numbers}
        found = known.peaks[key] = fullest(known, recompute, layout.micro_rows, ranks, own)
    return found[known.place_of_cut(layout)]


def _telling(known: Holdings, layout: Layout, pipeline: Pipeline, *, offloaded: bool) -> Told:
    """Return ranks with the same blocks as one, at moments of which no other may have more."""
    found: Told | None = known.peaks.get((offloaded, pipeline))
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
        found = known.peaks[offloaded, pipeline] = told(known, ranks, offloaded=offloaded)
    return found
