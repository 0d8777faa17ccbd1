"""Bytes on a rank while micro-batches are under way: what is kept of one, and what running needs.

All of it goes by kinds of blocks. What a kind keeps is worked out for several cuts at once, and
what a chunk keeps once for all ranks and schedules that have one like it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import add, sub
from typing import Any, NamedTuple

from ..gradients.brought import Brought, brings, brought
from ..holding import Holdings
from ..holding.live import SPLIT
from ..layout import Layout
from .sharing import gathering, sharing
from .sizes import halves_of, kept_in, shared_of, sizes_of
from .working import Action, works


class Working(dict[Action, int]):
    """Bytes by the action, worked out when somebody asks."""

    def __init__(self, work: Callable[[Action], int]) -> None:
        super().__init__()
        self._work = work

    def __missing__(self, action: Action) -> int:
        self[action] = found = self._work(action)
        return found


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
    working: Working
    sizes: tuple[int, ...]
    always: int
    brought: tuple[int, ...] = ()


def running(
    known: Holdings, layout: Layout, ranks: Sequence[tuple[int, tuple[bool, ...]]]
) -> list[Running]:
    """Return what ranks need for micro-batches.

    What a chunk has sent on is kept; what it has received is kept by its first layer, if that is
    not offloaded.

    Args:
        known: Of the description.
        layout: The layout.
        ranks: Number and halves of each, as `Busy`.
    """
    split, which = layout.schedule in SPLIT, brings(known, layout)
    key = layout.cut, layout.recompute, layout.micro_rows, split, which
    grid = layout.grid
    if which:
        batches = layout.zero == 3 and layout.micro_batches
        key = *key, grid.etp, *((layout.zero, grid.cp * grid.dp, batches) if layout.zero else ())
    found: dict[Any, Running] | None = known.running.get(key)
    if found is None:
        found = known.running[key] = {}
    each = [(number, halves if layout.zero == 2 else ()) for number, halves in ranks]
    for own in each:
        if own not in found:
            comes = brought(known, layout, *own) if which else None
            found[own] = _running(known, layout, own[0], comes)
    return [found[own] for own in each]


def _running(known: Holdings, layout: Layout, number: int, own: Brought | None) -> Running:
    """Return what a rank needs; `own` is what it is brought, if it is."""
    content, all_runs = known.content(number), known.runs(number)
    split, offloaded = layout.schedule in SPLIT, layout.recompute == "offload"
    sizes = sizes_of(known, layout)
    at = known.place_of_cut(layout)
    kept = tuple([kept_in(sizes, runs)[at] for runs in all_runs])
    if split:
        kept += tuple([halves_of(sizes, runs)[at] for runs in all_runs])
    shards = own is not None and not own.runs

    def work(action: Action) -> int:
        if shards and action[2]:
            return sharing(known, layout, number, action)
        if layout.zero == 3 and action[0] == "F":
            return gathering(known, layout, number)
        return works(known, sizes, number, action, None if shards else own, layout)[at]

    sent = tuple([sizes.handed[kind][at] for kind in content.left])
    received = tuple([sizes.handed[kind][at] for kind in content.entered])
    passed = tuple(map(add, sent, received)) if offloaded else sent
    flags = own.flags if own else ()
    return Running(
        kept, passed, Working(work), *_messages(known, kept, passed, sent, received), flags
    )


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
    sizes = sizes_of(known, layout)
    at = known.place_of_cut(layout)
    kinds = Counter[int]()
    for kind, times in known.runs(number)[chunk]:
        kinds[kind] += times
    for kind, times in kinds.items():
        again = kind in known.layers and layout.recompute == "full"
        named = f"{times} x {known.name(kind)}"
        yield f"inputs of {named}" if again else named, sizes.kept[kind][at] * times
    yield "shared", shared_of(sizes, known.runs(number)[chunk])[at]


def left_of(known: Holdings, layout: Layout, number: int, chunk: int) -> Iterator[tuple[str, int]]:
    """Yield what the first half of a backward of a chunk leaves for the second, by kinds."""
    sizes = sizes_of(known, layout)
    at = known.place_of_cut(layout)
    for kind, times in known.runs(number)[chunk]:
        yield f"halves of {times} x {known.name(kind)}", sizes.halves[kind][at] * times
