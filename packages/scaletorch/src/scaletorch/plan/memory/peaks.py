"""The most that any rank of a layout holds, of which a search asks more often than of all ranks.

A rank's bytes are those of its state, which go by the grid and ZeRO, and those of micro-batches
under way, which go by the cut, recomputation and the schedule. Each sum is worked out once, for
those ranks and moments alone that may be the fullest.
"""

from __future__ import annotations

from operator import add, ge, mul
from typing import NamedTuple

from ..holding import Holdings
from ..layout import Layout
from .busy import Moment, Pipeline, busy, pipeline_of
from .running import Running, running
from .state import state

Action = tuple[str, int]
Counts = tuple[int, ...]


class Telling(NamedTuple):
    """Ranks of the pipeline that have the same blocks.

    Attributes:
        number: Of `known.numbers(layout)`.
        halves: Of `halved`.
        moments: At which one of them may hold the most: which action runs, and how many there are
            of what is kept, of messages sent, kept ones with them, and of messages received.
    """

    number: int
    halves: tuple[bool, ...]
    moments: list[tuple[Action, Counts]]


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
        ran, early = running(known, layout), known.description.early
        found = known.peaks[key] = [
            _most(ran[each.number], each, early=early) for each in _telling(known, layout, pipeline)
        ]
    return found


def _most(own: Running, each: Telling, *, early: bool) -> int:
    """Return the most bytes; what is passed on is of the size of what is sent, and received."""
    kept, sent, received, always = [*own.kept], own.sent, own.received, 0
    for chunk, (passed, size) in enumerate(zip(own.passed, own.sent, strict=True)):
        kept[chunk] += passed - size * early  # where it is early, it is counted as sent
    if not early:
        always = max(sent) + max(received)
        sent = received = (0,) * len(sent)
    sizes, working = (*kept, *sent, *received), own.working
    return always + max(
        [sum(map(mul, counts, sizes)) + working[action] for action, counts in each.moments]
    )


def _telling(known: Holdings, layout: Layout, pipeline: Pipeline) -> list[Telling]:
    """Return the ranks of the pipeline, at moments of which no other may have more."""
    found: list[Telling] | None = known.peaks.get(pipeline)
    if found is None:
        each: dict[tuple[int, tuple[bool, ...]], dict[Action, set[Counts]]] = {}
        for number, halves, moments in busy(known, layout):
            own = each.setdefault((number, halves), {})
            for moment in moments:
                own.setdefault(moment.action, set()).add(_counts(moment))
        found = known.peaks[pipeline] = [
            Telling(*key, [(a, counts) for a, all_ in own.items() for counts in _outer(all_)])
            for key, own in each.items()
        ]
    return found


def _counts(moment: Moment) -> Counts:
    return (*moment.kept, *map(add, moment.kept, moment.sent), *moment.received)


def _outer(counts: set[Counts]) -> list[Counts]:
    """Return those that may have the most bytes, whatever the sizes of all are.

    Others have no more of anything than another one, or than a mean of two others.
    """
    found: list[Counts] = []
    for each in sorted(counts, reverse=True):
        while len(found) > 1 and _between(found[-2], found[-1], each):
            found.pop()
        if not any(all(map(ge, more, each)) for more in found):
            found.append(each)
    return found


def _between(first: Counts, middle: Counts, last: Counts) -> bool:
    """Return whether a mean of the outer ones has as much of all as the one in the middle."""
    whole, part = first[0] - last[0], middle[0] - last[0]
    return whole > 0 and all(
        whole * b <= part * a + (whole - part) * c
        for a, b, c in zip(first, middle, last, strict=True)
    )
