"""Bytes on a rank while micro-batches are under way: what is kept of one, and what running needs.

All of it goes by kinds of blocks. What a kind keeps is worked out once for all cuts, and what a
chunk keeps once for all ranks and schedules that have one like it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import add, sub
from typing import NamedTuple

from ..holding import Holdings
from ..holding.brought import END, Brought, brings, brought
from ..holding.live import SPLIT
from ..layout import Layout
from .sizes import halves_of, kept_in, shared_of, sizes_of
from .working import Action, works


class Running(NamedTuple):
    """Bytes of a rank of the pipeline.

    Attributes:
        kept: Of a micro-batch until its backward, by chunk; then of halves of one, by chunk.
        passed: Of messages that the pipeline keeps of a micro-batch until its backward, by chunk.
        working: Of the block that needs the most while an action runs, above what all keep; by the
            action.
        sizes: Of what `Moment.counts` counts.
        brought: Of gradients that `Moment.made` has.
        always: Of messages between stages that are there at any time, which are not counted.
    """

    kept: tuple[int, ...]
    passed: tuple[int, ...]
    working: dict[Action, int]
    sizes: tuple[int, ...]
    always: int
    brought: tuple[int, ...] = ()


def running(known: Holdings, layout: Layout, numbers: Sequence[int]) -> list[Running]:
    """Return what ranks of these numbers need for micro-batches.

    What a chunk has sent on is kept; what it has received is kept by its first layer, if that is
    not offloaded.
    """
    split = layout.schedule in SPLIT
    bringing = brings(known, layout)
    key = layout.cut, layout.recompute, layout.micro_rows, split, bringing and layout.grid.etp
    found: dict[int, Running] | None = known.running.get(key)
    if found is None:
        found = known.running[key] = {}
    for number in numbers:
        if number not in found:
            own = brought(known, layout, number) if bringing else None
            found[number] = _running(known, layout, number, own)
    return [found[number] for number in numbers]


def _running(known: Holdings, layout: Layout, number: int, own: Brought | None) -> Running:
    """Return what a rank needs; `own` is what it is brought, if it is."""
    content, all_runs = known.content(number), known.runs(number)
    split, offloaded = layout.schedule in SPLIT, layout.recompute == "offload"
    sizes = sizes_of(known, layout.recompute, layout.micro_rows)
    at = known.place_of_cut(layout)
    kept = tuple([int(kept_in(sizes, runs)[at]) for runs in all_runs])
    if split:
        kept += tuple([int(halves_of(sizes, runs)[at]) for runs in all_runs])
    actions: list[Action] = [
        (kind, chunk, first)
        for chunk in range(len(all_runs))
        for kind in ("F", "B", *"IW" * split)
        for first in ((False, True) if own and kind != "F" else (False,))
    ]
    working = {each: int(works(known, sizes, number, each, own)[at]) for each in actions}
    working[END, 0, False] = 0
    sent = tuple([int(sizes.handed[kind][at]) for kind in content.left])
    received = tuple([int(sizes.handed[kind][at]) for kind in content.entered])
    passed = tuple(map(add, sent, received)) if offloaded else sent
    flags = own.flags if own else ()
    return Running(kept, passed, working, *_messages(known, kept, passed, sent, received), flags)


def _messages(
    known: Holdings,
    kept: tuple[int, ...],
    passed: tuple[int, ...],
    sent: tuple[int, ...],
    received: tuple[int, ...],
) -> tuple[tuple[int, ...], int]:
    """Return `Running.sizes` and `always`.

    Of messages that are kept until their backward, those that are counted as sent are no part of
    what comes with a micro-batch.
    """
    early = known.description.early
    counted = sent if early else (0,) * len(sent)
    own = map(add, kept, map(sub, passed, counted))
    whole = (*own, *kept[len(passed) :])
    if early:
        return (*whole, *sent, *received), 0
    return (*whole, *counted, *counted), max(sent) + max(received)


def kept_of(known: Holdings, layout: Layout, number: int, chunk: int) -> Iterator[tuple[str, int]]:
    """Yield what autograd keeps of a micro-batch in a chunk, by kinds of blocks."""
    sizes = sizes_of(known, layout.recompute, layout.micro_rows)
    at = known.place_of_cut(layout)
    kinds = Counter[int]()
    for kind, times in known.runs(number)[chunk]:
        kinds[kind] += times
    for kind, times in kinds.items():
        again = kind in known.layers and layout.recompute == "full"
        named = f"{times} x {known.name(kind)}"
        yield f"inputs of {named}" if again else named, int(sizes.kept[kind][at]) * times
    yield "shared", int(shared_of(sizes, known.runs(number)[chunk])[at])


def left_of(known: Holdings, layout: Layout, number: int, chunk: int) -> Iterator[tuple[str, int]]:
    """Yield what the first half of a backward of a chunk leaves for the second, by kinds."""
    sizes = sizes_of(known, layout.recompute, layout.micro_rows)
    at = known.place_of_cut(layout)
    for kind, times in known.runs(number)[chunk]:
        yield f"halves of {times} x {known.name(kind)}", int(sizes.halves[kind][at]) * times
