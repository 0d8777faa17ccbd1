"""Gradients that a step brings, and that are not there before its first backward.

Between ranks that sum gradients buckets stay from step to step. Without such ranks `zero_grad`
drops gradients, and each comes with the first backward of its chunk, or with that half of it which
makes it. Shards come when gradients are summed: with ZeRO 2 at the end of each backward, of which
the first one's stay, with ZeRO 1 at the end of the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Literal, NamedTuple

from ...parallel.pg_manager import Grid
from ...parallel.pipeline_parallel import Action, derive_messages
from ..holding.buckets import Held
from ..holding.holdings import Holdings
from ..holding.live import CHANGES, SPLIT, Counts, outer
from ..holding.repeating import LONG, followed
from ..holding.stages import schedule_of
from ..holding.under_way import Message, moments_of
from ..layout import Layout
from .ties import of_ties

END = "E"  # the kind of what comes behind all actions


class Bringing(NamedTuple):
    """What a rank keeps while an action runs, and which gradients are there.

    Attributes:
        kind: As `During`; or "E", at the end of a step.
        chunk: Of the action.
        brings: Whether it brings gradients.
        moments: As `During`, with which gradients are there before it: 0 or 1 by chunk, behind
            them of those that second halves of backwards make if the schedule has such, and of
            tied weights' totals, which the end makes; and with the four counts of messages of
            `UnderWay`.
    """

    kind: str
    chunk: int
    brings: bool
    moments: tuple[tuple[Counts, Counts, Counts], ...]


class Brought(NamedTuple):
    """Bytes of a rank's gradients that are not there before a step.

    Attributes:
        flags: As `Bringing.moments`.
        runs: By chunk, of a block of each of `Holdings.runs`: those of first halves, and of second.
            () if they come as shards.
    """

    flags: tuple[int, ...]
    runs: tuple[tuple[tuple[int, int], ...], ...]


def brings(known: Holdings, layout: Layout) -> Literal["", "first", "each", "last"]:
    """Return which backwards bring gradients; "" if all are there before a step.

    Sums of another dtype have buckets anyway. Other programs than this library are taken to have
    gradients always, and so are pipelines of more than `LONG` ranks, whose programs would take a
    search long to follow.
    """
    if layout.grid.pp > LONG or not known.description.early:
        return ""
    if layout.grid.cp * layout.grid.dp > 1:
        return {1: "last", 2: "each", 3: "each"}.get(layout.zero, "")  # type: ignore[return-value]
    return "first" if layout.zero == 0 and known.optimizer.sum_item is None else ""


def brought(known: Holdings, layout: Layout, number: int, halves: tuple[bool, ...] = ()) -> Brought:
    """Return what a step brings to a rank.

    Args:
        known: Of the description.
        layout: The layout.
        number: Of `known.numbers(layout)`.
        halves: Of `halved`, of its place in the pipeline, which ZeRO 2 goes by.
    """
    grid, split = layout.grid, layout.schedule in SPLIT
    halves = halves if layout.zero == 2 else ()
    key = grid.tp, grid.ep, grid.etp, grid.cp * grid.dp, layout.zero, split, halves, number
    found: Brought | None = known.brought.get(key)
    if found is None:
        if layout.zero:
            found = Brought(_shards(known, layout, number, halves), ())
        else:
            found = _brought(known, layout, number)
        known.brought[key] = found
    return found


def _shards(
    known: Holdings, layout: Layout, number: int, halves: tuple[bool, ...]
) -> tuple[int, ...]:
    """Return the bytes of shards by what makes them; with ZeRO 1 all of them as the first."""
    chunks = len(known.content(number).chunks)
    flags = [0] * (chunks * (2 if layout.schedule in SPLIT else 1) + 1)
    flags[-1] = of_ties(known, layout, number)[0]
    replica = known.replica(layout, number, halves)
    for axis, buckets in known.buckets(layout, number).items():
        ranks = layout.grid.edp if axis == "edp" else layout.grid.cp * layout.grid.dp
        place = replica[axis == "edp"]
        for bucket, times in buckets.each:
            if bucket.sharded:
                made = bucket.made(ranks, place, halves) if layout.zero == 2 else {(0, False)}
                share = bucket.padded(ranks) // ranks * bucket.master_item(layout.zero)
                for chunk, late in made:
                    flags[chunk + chunks * late] += share * times
    return tuple(flags)


def _brought(known: Holdings, layout: Layout, number: int) -> Brought:
    chunks, split = len(known.content(number).chunks), layout.schedule in SPLIT
    flags = [0] * (chunks * (2 if split else 1) + 1)
    for each in known.parameters(layout, number):
        if not _summed(layout, each):
            flags[each.chunk + chunks * (split and each.late)] += each.elements * each.item
    runs = tuple(
        tuple(_sums(gradients_of(known, layout, number, chunk, kind)) for kind, _ in own)
        for chunk, own in enumerate(known.runs(number))
    )
    return Brought(tuple(flags), runs)


def _sums(gradients: Iterable[tuple[str, int, bool]]) -> tuple[int, int]:
    sums = Counter[bool]()
    for _, size, late in gradients:
        sums[late] += size
    return sums[False], sums[True]


def _summed(layout: Layout, held: Held) -> bool:
    return held.expert and layout.grid.edp > 1


def gradients_of(
    known: Holdings, layout: Layout, number: int, chunk: int, kind: int
) -> Iterator[tuple[str, int, bool]]:
    """Yield the gradients that a block brings; a tied one comes with the last block.

    Args:
        known: Of the description.
        layout: One whose first backward brings gradients.
        number: Of `known.numbers(layout)`.
        chunk: Of the rank.
        kind: Of the block.

    Yields:
        Whose it is, bytes, and whether the second half of a backward makes it.
    """
    behaviours = known.description.behaviours(layout.cut)
    content, at = known.content(number), known.fullest(layout, number)
    ties = {name for names in known.description.tied for name in names}
    apart = layout.grid.ep * layout.grid.etp != layout.grid.tp and layout.grid.edp > 1
    for each in behaviours[kind].parameters:
        name = f"{kind}.{each.name}"
        last = name not in ties or _is_last(known, name, chunk, content.chunks)
        if last and not (each.expert and apart):
            size = each.local[min(at, len(each.local) - 1)] * each.item
            yield each.name, size, layout.schedule in SPLIT and each.late


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


def most_brought(layout: Layout, which: str) -> tuple[tuple[Bringing, ...], ...]:
    """Return for each rank of the pipeline what is there at the moments at which it may be most.

    No more micro-batches are followed than it takes until all repeats itself; schedules that keep
    all of them have as many more of each that is kept.

    Args:
        layout: Of the pipeline.
        which: Of `brings`.
    """
    schedule, pp, m = layout.schedule, layout.grid.pp, layout.micro_batches
    few = followed(schedule, pp, m)
    if schedule != "interleaved_1f1b":  # which has no other rounds than it has
        few = min(m, few + 2)
    more = m - few if schedule in ("afab", "looped_bfs") else 0
    return _most_brought(schedule, pp, layout.chunks, few, more, which)


@lru_cache(maxsize=1024)
def _most_brought(
    schedule: str, pp: int, chunks: int, m: int, more: int, which: str
) -> tuple[tuple[Bringing, ...], ...]:
    built = schedule_of(Layout(Grid(pp=pp), schedule=schedule, chunks=chunks, micro_batches=m))
    programs = zip(derive_messages(built), built.stages, strict=True)
    return tuple(
        _followed(program, stages, chunks * (schedule in SPLIT), more, which)
        for program, stages in programs
    )


def _followed(
    program: Sequence[Action | Message], stages: Sequence[int], halves: int, more: int, which: str
) -> tuple[Bringing, ...]:
    """Follow a rank; `halves` is how many chunks have such."""
    chunks = len(stages)
    found: dict[tuple[str, int, bool], set[Counts]] = {}
    none = (0,) * 4 * chunks
    now, there = [0] * (chunks + halves), [0] * (chunks + halves + 1)
    backwards = sum(isinstance(each, Action) and each.kind != "F" for each in program)
    for action, _, held in moments_of(program, stages):
        kind, chunk = action.kind, action.chunk
        before = (*now, *there)
        whole, half = CHANGES[kind]
        now[chunk] += whole
        if half:
            now[chunk + chunks] += half
        backwards -= kind != "F"
        made = _made(kind, chunk, chunks, halves) if which != "last" or not backwards else []
        brings = bool(made) and (which != "first" or any(not there[at] for at in made))
        for at in made:
            there[at] = 1
        own = (*now, *there) if kind == "F" else before
        if which != "last" or backwards:
            own = (*(n and n + more for n in own[: len(now)]), *own[len(now) :])
        found.setdefault((kind, chunk, brings), set()).add((*own, *chain(*held.each)))
    found[END, 0, False] = {(0,) * len(now) + (1,) * len(there) + none}
    size, after = len(now), len(now) + len(there)
    return tuple(
        Bringing(
            *key,
            tuple((own[:size], own[size:after], own[after:]) for own in outer(moments)),
        )
        for key, moments in found.items()
    )


def _made(kind: str, chunk: int, chunks: int, halves: int) -> list[int]:
    """Return the flags of gradients that an action makes."""
    early, late = [chunk] * (kind in "BI"), [chunk + chunks] * (kind in "BW" and halves > 0)
    return early + late
