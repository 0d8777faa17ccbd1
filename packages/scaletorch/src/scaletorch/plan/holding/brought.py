"""Gradients that a step brings: where no ranks sum them, there are none before the first backward.

Between ranks that sum gradients buckets stay from step to step. Without such ranks `zero_grad`
drops gradients, and each comes with the first backward of its chunk, or with that half of it which
makes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from ...parallel.pg_manager import Grid
from ..layout import Layout
from .alike import latest_ties
from .buckets import Held
from .holdings import Holdings
from .live import CHANGES, SPLIT, Counts, Moves, enough, outer
from .stages import schedule_of

END = "E"  # the kind of what comes behind all actions


class Bringing(NamedTuple):
    """What a rank keeps while an action runs, and which gradients are there.

    Attributes:
        kind: As `During`; or "E", at the end of a step.
        chunk: Of the action.
        first: Whether it is the first of its kind, which brings gradients.
        moments: As `During`, with which gradients are there before it: 0 or 1 by chunk, and behind
            them of those that second halves of backwards make if the schedule has such.
    """

    kind: str
    chunk: int
    first: bool
    moments: tuple[tuple[Counts, Counts], ...]


class Brought(NamedTuple):
    """Bytes of a rank's gradients that are not there before a step.

    Attributes:
        flags: By chunk, and behind them those of second halves; as `Bringing.moments`.
        runs: By chunk, of a block of each of `Holdings.runs`: those of first halves, and of second.
    """

    flags: tuple[int, ...]
    runs: tuple[tuple[tuple[int, int], ...], ...]


def brings(known: Holdings, layout: Layout) -> bool:
    """Return whether a step brings gradients: sums of another dtype have buckets anyway."""
    alone = layout.grid.cp * layout.grid.dp == 1 and layout.zero == 0
    return alone and known.optimizer.sum_item is None


def brought(known: Holdings, layout: Layout, number: int) -> Brought:
    """Return what a step brings to a rank of `known.numbers(layout)`."""
    key = layout.grid.tp, layout.grid.ep, layout.grid.etp, layout.schedule in SPLIT, number
    found: Brought | None = known.brought.get(key)
    if found is None:
        found = known.brought[key] = _brought(known, layout, number)
    return found


def _brought(known: Holdings, layout: Layout, number: int) -> Brought:
    chunks, split = len(known.content(number).chunks), layout.schedule in SPLIT
    flags = [0] * (chunks * (2 if split else 1))
    for each in known.parameters(layout, number):
        if not _summed(layout, each):
            flags[each.chunk + chunks * (split and each.late)] += each.elements * each.item
    each_kind = dict(_of_kinds(known, layout, number, split=split))
    none = 0, 0
    runs = tuple(
        tuple(each_kind.get((chunk, kind), none) for kind, _ in own)
        for chunk, own in enumerate(known.runs(number))
    )
    return Brought(tuple(flags), runs)


def _summed(layout: Layout, held: Held) -> bool:
    return held.expert and layout.grid.edp > 1


def _of_kinds(
    known: Holdings, layout: Layout, number: int, *, split: bool
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the gradients of a block by chunk and kind; a tied one comes with the last block."""
    behaviours = known.description.behaviours(layout.cut)
    content, at = known.content(number), known.fullest(layout, number)
    latest = latest_ties(known.description, content.chunks, behaviours)
    apart = layout.grid.ep * layout.grid.etp != layout.grid.tp and layout.grid.edp > 1
    for chunk, kinds in enumerate(content.chunks):
        for kind in dict.fromkeys(kinds):
            sums = Counter[bool]()
            for each in behaviours[kind].parameters:
                name = f"{kind}.{each.name}"
                last = name not in latest or _is_last(known, name, chunk, content.chunks)
                if last and not (each.expert and apart):
                    size = each.local[min(at, len(each.local) - 1)] * each.item
                    sums[split and each.late] += size
            yield (chunk, kind), (sums[False], sums[True])


def _is_last(known: Holdings, name: str, chunk: int, chunks: tuple[tuple[int, ...], ...]) -> bool:
    """Return whether a rank has no tied parameter's other name behind this one."""
    (names,) = [names for names in known.description.tied if name in names]
    places = [
        (at, place, kind)
        for at, own in enumerate(chunks)
        for place, kind in enumerate(own)
        if any(int(other.partition(".")[0]) == kind for other in names)
    ]
    return max(places)[::2] == (chunk, int(name.partition(".")[0]))


def most_brought(layout: Layout) -> tuple[tuple[Bringing, ...], ...]:
    """Return for each rank of the pipeline what is there at the moments at which it may be most."""
    grid, m = layout.grid, layout.micro_batches
    if layout.schedule not in ("afab", "looped_bfs"):  # these keep all micro-batches anyway
        m = min(m, enough(layout.schedule, grid.pp, m, layout.chunks) + 2 * grid.pp)
    if layout.schedule == "interleaved_1f1b":  # no other rounds than it has
        m = enough(layout.schedule, grid.pp, layout.micro_batches, layout.chunks)
    return _most_brought(layout.schedule, grid.pp, layout.chunks, m)


@lru_cache(maxsize=1024)
def _most_brought(schedule: str, pp: int, chunks: int, m: int) -> tuple[tuple[Bringing, ...], ...]:
    built = schedule_of(Layout(Grid(pp=pp), schedule=schedule, chunks=chunks, micro_batches=m))
    counts = chunks * (2 if schedule in SPLIT else 1)
    return tuple(
        _followed([(action.kind, action.chunk) for action in own], chunks, counts)
        for own in built.ranks
    )


def _followed(moves: Moves, chunks: int, counts: int) -> tuple[Bringing, ...]:
    found: dict[tuple[str, int, bool], set[Counts]] = {}
    now, there = [0] * counts, [0] * counts
    for kind, chunk in moves:
        before = (*now, *there)
        whole, half = CHANGES[kind]
        now[chunk] += whole
        if half:
            now[chunk + chunks] += half
        made = [] if kind == "F" else [chunk + chunks] if kind == "W" else [chunk]
        if kind == "B" and counts > chunks:
            made.append(chunk + chunks)
        first = any(not there[at] for at in made)
        for at in made:
            there[at] = 1
        own = (*now, *there) if kind == "F" else before
        found.setdefault((kind, chunk, first), set()).add(own)
    found[END, 0, False] = {(0,) * counts + tuple(there)}
    return tuple(
        Bringing(*key, tuple((own[:counts], own[counts:]) for own in outer(moments)))
        for key, moments in found.items()
    )
