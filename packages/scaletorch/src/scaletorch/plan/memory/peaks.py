"""The most that any rank of a layout holds, of which a search asks more often than of all ranks.

A rank's bytes are those of its state, which go by the grid and ZeRO, and those of micro-batches
under way, which go by the cut, recomputation and the schedule. Each sum is worked out once, for
those ranks and moments alone that may be the fullest.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, sub
from typing import NamedTuple

from ..gradients.brought import brings, brought
from ..gradients.filling import MADE
from ..gradients.open_buckets import most_filled
from ..gradients.ties import of_ties
from ..holding import Holdings
from ..holding.holdings import asked_together
from ..holding.live import SPLIT, Counts, outer
from ..layout import Layout, Recompute
from .busy import Busy, Moment, Pipeline, busy, busy_at_last, pipeline_with
from .ranks import held_by, ranks_hold
from .running import running
from .state import state
from .weights import Fullest, Told, fullest, told
from .working import Action

# Messages by which bounds may be off where halves of backwards are put off: without shards those
# count that are there when a rank keeps the most, and with them those of each moment.
SLACK = 4

Moving = tuple[Fullest, int]  # of all cuts, and which of them it is


class Bounds(NamedTuple):
    """Bytes between which the largest total of `memory` is: the same, where that costs little.

    Attributes:
        least: No less.
        most: No more; None if that was not asked, as `least` is too much.
        each: The most of each rank that `_telling` names, or each of its groups, if the peak is not
            known.
    """

    least: int
    most: int | None
    each: Sequence[int] = ()

    def fits(self, memory: int) -> bool | None:
        """Return whether the total is no more than that; None if it lies between the bounds."""
        if self.most is not None and self.most <= memory:
            return True
        return False if self.least > memory else None

    def above(self, more: int) -> Bounds:
        """Return the bounds of what is more by so many bytes."""
        return Bounds(self.least + more, None if self.most is None else self.most + more)


def known_to_be(peak: int) -> Bounds:
    """Return bounds of a peak that is known."""
    return Bounds(peak, peak)


def peak(known: Holdings, layout: Layout) -> int:
    """Return the largest total of `memory`."""
    return exactly(known, layout, Peaks(known, layout)(layout.recompute, layout.zero))


def exactly(known: Holdings, layout: Layout, bounds: Bounds) -> int:
    """Return the peak of a layout; ranks that cannot have it are not looked at."""
    if bounds.most is None:
        return peak(known, layout)
    if bounds.least == bounds.most:
        return bounds.least
    each: dict[int, int] = {}
    told = _telling(known, layout, pipeline_with(layout, ""), offloaded=False)
    places = [at for at, _ in told.groups] if layout.zero == 2 else range(len(told.ranks))
    for number, most in zip((told.ranks[at][0] for at in places), bounds.each, strict=True):
        each[number] = max(most, each.get(number, 0))
    found = 0
    for rank in sorted(busy(known, layout).each, key=lambda own: -each[own.number]):
        if each[rank.number] <= found:
            break
        (own,) = running(known, layout, [rank[:2]])
        found = max(found, held_by(known, layout, own, rank).total)
    return found


class Peaks:
    """Bounds of the peak of a layout by recomputation and stage of ZeRO.

    Shards come one after another: that is followed for no more layouts than somebody asks for.

    Args:
        known: Of the description.
        layout: The layout.
        memory: Of a rank; if given, bounds are no nearer to each other than it takes to see what
            fits into it.
    """

    __slots__ = "_held", "_known", "_layout", "_memory", "_moving", "_pipeline", "_summed"

    def __init__(self, known: Holdings, layout: Layout, memory: int | None = None) -> None:
        self._known, self._layout, self._memory = known, layout, memory
        self._summed = layout.grid.cp * layout.grid.dp > 1
        self._pipeline = pipeline_with(layout, "" if self._summed else brings(known, layout))
        self._held: dict[int, Held] = {}
        self._moving: dict[Recompute, Moving] = {}

    def before(self, zero: int) -> int:
        """Return what is there before a step, whatever runs again; 0 if only a peak tells that."""
        if zero == 3 or (not self._summed and zero != self._layout.zero):
            return 0
        return self._held_with(zero).most

    def _held_with(self, zero: int) -> Held:
        if zero not in self._held:
            self._held[zero] = _held(self._known, self._layout, zero, self._pipeline)
        return self._held[zero]

    def __call__(self, recompute: Recompute, zero: int) -> Bounds:
        """Return the bounds."""
        if zero == 3:  # a block at a time; so few layouts have it that each is followed
            held_by_all = ranks_hold(self._known, self._layout.saving(recompute, zero))
            return known_to_be(max(each.total for each in held_by_all))
        if not self._summed and zero != self._layout.zero:
            # By that goes whether a step brings gradients.
            return known_to_be(peak(self._known, self._layout.saving(recompute, zero)))
        if recompute not in self._moving:
            self._moving[recompute] = self._needs(recompute, last=False)
        before, _, shards, ends = self._held_with(zero)
        found, at = self._moving[recompute]
        plain = [*map(add, before, found.of_ranks(at))]
        least = max(*plain, *ends)
        return self._shared(recompute, zero, plain, least) if shards else known_to_be(least)

    def _shared(self, recompute: Recompute, zero: int, plain: list[int], least: int) -> Bounds:
        """Return the bounds where gradients are summed into shards; `plain` is without them."""
        found, at = self._moving[recompute]
        split = zero == 1 and self._layout.schedule in SPLIT
        slack = SLACK * found.message[at] if split else 0
        if self._memory is not None and least - slack > self._memory:
            return Bounds(least - slack, None)
        beside = _beside(self._known, self._layout, zero, self._pipeline, self._held[zero])
        moving = found.of_ranks(at) if zero == 1 else found.of_groups(at)
        each = [*map(add, beside, moving)]
        if zero == 1 and (self._memory is None or self._memory < max(each)):
            latest, _ = self._needs(recompute, last=True)  # which has one micro-batch alone
            each = [*map(max, plain, map(add, beside, latest.of_ranks(at)))]
        return Bounds(least - slack, max(each) + slack, [most + slack for most in each])

    def _needs(self, recompute: Recompute, *, last: bool) -> Moving:
        own = self._layout
        if "selective" in (recompute, own.recompute):
            own = own.saving(recompute, own.zero)
        return _moving(self._known, own, recompute, self._pipeline, last=last)


class Held(NamedTuple):
    """What ranks hold.

    Attributes:
        before: Bytes of each before a step.
        most: Of these.
        shards: Of each, if they come in buckets.
        ends: Of each at the end of a step.
    """

    before: list[int]
    most: int
    shards: list[int]
    ends: list[int]


def _held(known: Holdings, layout: Layout, zero: int, pipeline: Pipeline) -> Held:
    """Return what those ranks hold that `_telling` names, of the layout with a stage of ZeRO."""
    grid = layout.grid
    key = grid.tp, grid.ep, grid.etp, grid.cp * grid.dp, zero, pipeline
    found: Held | None = known.peaks.get(key)
    if found is None:
        ranks = _telling(known, layout, pipeline, offloaded=False).ranks
        own = layout.saving(layout.recompute, zero)
        before = [sum(state(known, own, number, halves=halves)) for number, halves in ranks]
        found = Held(before, max(before), [], before)
        if brings(known, own):
            come = [sum(brought(known, own, *rank).flags) for rank in ranks]
            before = [*map(sub, before, come)]
            at_end = [some + of_ties(known, own, rank[0])[1]
                      for some, rank in zip(come, ranks, strict=True)]  # fmt: skip
            ends = [*map(add, before, at_end)]
            found = Held(before, max(before), come if zero else [], ends)
        known.peaks[key] = found
    return found


def _beside(
    known: Holdings, layout: Layout, zero: int, pipeline: Pipeline, held: Held
) -> list[int]:
    """Return what ranks hold with all that comes of buckets and shards.

    With ZeRO 1 that is in the last backward; with ZeRO 2 it is by groups of the ranks' moments.
    """
    grid = layout.grid
    key = "beside", grid.tp, grid.ep, grid.etp, grid.cp * grid.dp, zero, pipeline
    found: list[int] | None = known.peaks.get(key)
    if found is None:
        before, _, shards, ends = held
        told = _telling(known, layout, pipeline, offloaded=False)
        own = layout.saving(layout.recompute, zero)
        if zero == 1:
            most = [most_filled(known, own, number, "B", 0) for number, _ in told.ranks]
            found = [*map(max, map(add, before, most), ends)]
        else:
            found = [
                max(before[at] + shards[at] + _filled(known, own, told.ranks[at][0], action),
                    ends[at])
                for at, action in told.groups
            ]  # fmt: skip
        known.peaks[key] = found
    return found


def _filled(known: Holdings, layout: Layout, number: int, action: Action) -> int:
    kind, chunk, _ = action
    return most_filled(known, layout, number, kind, chunk) if kind in MADE else 0


def _moving(
    known: Holdings, layout: Layout, recompute: Recompute, pipeline: Pipeline, *, last: bool
) -> Moving:
    """Return what micro-batches need on the same ranks, and gradients that a step brings.

    Where it brings none, all cuts of `asked_together` are summed at once. `last`: in the last
    backward alone.
    """
    bringing = pipeline[-1]
    key: tuple[object, ...] = recompute, layout.micro_rows, asked_together(layout), pipeline, last
    if bringing:
        key = *key, layout.cut, layout.grid.etp
    found: Fullest | None = known.peaks.get(key)
    if found is None:
        ranks = _telling(known, layout, pipeline, offloaded=recompute == "offload", last=last)
        numbers = {number for number, _ in ranks.ranks} if bringing else ()
        own = {number: brought(known, layout, number) for number in numbers}
        own_way = layout.saving(recompute, layout.zero)
        found = known.peaks[key] = fullest(known, own_way, ranks, own)
    return found, known.place_of_cut(layout)


def _telling(
    known: Holdings, layout: Layout, pipeline: Pipeline, *, offloaded: bool, last: bool = False
) -> Told:
    """Return ranks with the same blocks as one, at moments of which no other may have more."""
    key = offloaded, last, pipeline
    found: Told | None = known.peaks.get(key)
    if found is None:
        each: dict[tuple[int, tuple[bool, ...]], dict[Action, dict[Counts, Moment]]] = {}
        ranks = busy_at_last(known, layout) if last else busy(known, layout, pipeline).each
        for number, halves, moments in ranks:
            own = each.setdefault((number, halves), {})
            for moment in moments:
                own.setdefault(moment.action, {})[*moment.counts, *moment.made] = moment
        chosen = [
            Busy(*own, tuple(found[counts] for found in all_.values() for counts in outer(found)))
            for own, all_ in each.items()
        ]
        found = known.peaks[key] = told(known, chosen, offloaded=offloaded)
    return found
