"""The most that any rank of a layout holds, of which a search asks more often than of all ranks.

A rank's bytes are those of its state, which go by the grid and ZeRO, and those of micro-batches
under way, which go by the cut, recomputation and the schedule. Each sum is worked out once, for
those ranks and moments alone that may be the fullest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add, sub
from typing import NamedTuple

from ..holding import Holdings
from ..holding.brought import brings, brought
from ..holding.filling import most_filled
from ..holding.live import Counts, outer
from ..holding.ties import of_ties
from ..layout import Layout, Recompute
from .busy import Busy, Moment, Pipeline, busy, pipeline_of
from .ranks import held_by, ranks_hold
from .running import running
from .state import state
from .weights import Told, fullest, told
from .working import Action


class Bounds(NamedTuple):
    """Bytes between which the largest total of `memory` is: the same, where that costs little.

    Attributes:
        least: No less.
        most: No more.
        parts: What adds up to the most of each rank that `_telling` names, if that is not known.
    """

    least: int
    most: int
    parts: tuple[Sequence[int], Sequence[int]] = (), ()


def known_to_be(peak: int) -> Bounds:
    """Return bounds of a peak that is known."""
    return Bounds(peak, peak)


def peak(known: Holdings, layout: Layout) -> int:
    """Return the largest total of `memory`."""
    return exactly(known, layout, peaks_of(known, layout)(layout.recompute, layout.zero))


def exactly(known: Holdings, layout: Layout, bounds: Bounds) -> int:
    """Return the peak of a layout; ranks that cannot have it are not looked at."""
    if bounds.least == bounds.most:
        return bounds.most
    each: dict[int, int] = {}
    plain = layout.saving(layout.recompute, 0)
    ranks = _telling(known, plain, pipeline_of(known, plain), offloaded=False).ranks
    for (number, _), most in zip(ranks, map(add, *bounds.parts), strict=True):
        each[number] = max(most, each.get(number, 0))
    found = 0
    for rank in sorted(busy(known, layout).each, key=lambda own: -each[own.number]):
        if each[rank.number] <= found:
            break
        (own,) = running(known, layout, [rank[:2]])
        found = max(found, held_by(known, layout, own, rank).total)
    return found


def peaks_of(known: Holdings, layout: Layout) -> Callable[[Recompute, int], Bounds]:
    """Return bounds of the peak of a layout by recomputation and stage of ZeRO.

    Shards come one after another: that is followed for no more layouts than somebody asks for.
    """
    summed = layout.grid.cp * layout.grid.dp > 1
    plain = layout.saving(layout.recompute, 0) if summed else layout
    pipeline = pipeline_of(known, plain)
    held: dict[int, Held] = {}
    moving: dict[str, list[int]] = {}

    def at(recompute: Recompute, zero: int) -> Bounds:
        if zero == 3:  # a block at a time; so few layouts have it that each is followed
            held_by_all = ranks_hold(known, layout.saving(recompute, zero))
            return known_to_be(max(each.total for each in held_by_all))
        if not summed and zero != layout.zero:  # by which goes whether a step brings gradients
            return known_to_be(peak(known, layout.saving(recompute, zero)))
        if zero not in held:
            held[zero] = _held(known, plain.saving(recompute, zero), plain, pipeline)
        if recompute not in moving:
            own = plain
            if "selective" in (recompute, layout.recompute):
                own = plain.saving(recompute, plain.zero)
            moving[recompute] = _moving(known, own, recompute, pipeline)
        before, beside, end = held[zero]
        least = max(map(add, before, moving[recompute]))
        if beside is before:
            return known_to_be(least)
        most = max(map(add, beside, moving[recompute]))
        return Bounds(max(least, end), most, (beside, moving[recompute]))

    return at


class Held(NamedTuple):
    """Bytes of ranks before a step; with all that comes of buckets and shards; and at its end."""

    before: list[int]
    most: list[int]
    end: int


def _held(known: Holdings, layout: Layout, plain: Layout, pipeline: Pipeline) -> Held:
    """Return what those ranks hold that `_telling` names of the plain layout."""
    grid = layout.grid
    key = grid.tp, grid.ep, grid.etp, grid.cp * grid.dp, layout.zero, pipeline
    found: Held | None = known.peaks.get(key)
    if found is None:
        ranks = _telling(known, plain, pipeline, offloaded=False).ranks
        before = [sum(state(known, layout, number, halves=halves)) for number, halves in ranks]
        found = Held(before, before, 0)
        if brings(known, layout):
            shards = [sum(brought(known, layout, *rank).flags) for rank in ranks]
            before = [*map(sub, before, shards)]
            ends = [own + of_ties(known, layout, rank[0])[1]
                    for own, rank in zip(shards, ranks, strict=True)]  # fmt: skip
            end = max(map(add, before, ends))
            found = Held(before, before, end)
            if layout.zero:  # of ZeRO 1 there are no shards before the last backward
                beside = [most_filled(known, layout, number) for number, _ in ranks]
                if layout.zero == 2:
                    beside = [*map(add, beside, shards)]
                beside = [*map(max, beside, ends)]
                found = Held(before, [*map(add, before, beside)], end)
        known.peaks[key] = found
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
        own_way = layout.saving(recompute, layout.zero)
        found = known.peaks[key] = fullest(known, recompute, layout.micro_rows, ranks, own, own_way)
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
