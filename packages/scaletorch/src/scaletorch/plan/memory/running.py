"""Bytes on a rank while micro-batches are under way: what is kept of one, and what running needs.

All of it goes by kinds of blocks. What a kind keeps is worked out once for a cut, and what a chunk
keeps once for all ranks and schedules that have one like it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import add, sub
from typing import NamedTuple

from ..holding import Holdings
from ..holding.live import SPLIT
from ..layout import Layout


class Sizes(NamedTuple):
    """Bytes of a micro-batch in blocks, by kinds.

    Attributes:
        kept: What autograd keeps of one: its input, if layers run again; nothing, if the host does.
        shared: What all of a chunk keep together, once.
        handed: What one hands on. One more, 0, is at its end: kind -1 of `Content` is none.
        halves: What the first half of a backward leaves of one for the second.
        under: What one keeps below those behind it while these run.
        forward: What one needs above that while it runs forward.
        backward: The same backward, in one or in the first half of it.
        left: `halves`, not rounded.
        chunks: `kept` and what a chunk needs, by the runs of its blocks.
        column: Of `weights`.
    """

    kept: list[int]
    shared: list[int]
    handed: list[int]
    halves: list[int]
    under: list[float]
    forward: list[float]
    backward: tuple[list[float], list[float]]
    left: list[float]
    chunks: dict[object, tuple[int, int]]
    column: list[int]


Runs = tuple[tuple[int, int], ...]  # kinds of blocks, and how many follow one another
Action = tuple[str, int]  # kind and chunk


class Running(NamedTuple):
    """Bytes of a rank of the pipeline.

    Attributes:
        kept: Of a micro-batch until its backward, by chunk; then of halves of one, by chunk.
        passed: Of messages that the pipeline keeps of a micro-batch until its backward, by chunk.
        working: Of the block that needs the most while an action runs, above what all keep; by the
            action's kind and chunk.
        sizes: Of what `Moment.counts` counts.
        always: Of messages between stages that are there at any time, which are not counted.
    """

    kept: tuple[int, ...]
    passed: tuple[int, ...]
    working: dict[Action, int]
    sizes: tuple[int, ...]
    always: int


def running(known: Holdings, layout: Layout, numbers: Sequence[int]) -> list[Running]:
    """Return what ranks of these numbers need for micro-batches.

    What a chunk has sent on is kept; what it has received is kept by its first layer, if that is
    not offloaded.
    """
    split = layout.schedule in SPLIT
    key = layout.cut, layout.recompute, layout.micro_rows, split
    found: dict[int, Running] | None = known.running.get(key)
    if found is None:
        found = known.running[key] = {}
    sizes = None
    for number in numbers:
        if number not in found:
            sizes = sizes or sizes_of(known, layout)
            halves = known.latest(layout, number) if split else ()
            found[number] = _running(known, sizes, number, halves, layout.recompute == "offload")
    return [found[number] for number in numbers]


def _running(
    known: Holdings, sizes: Sizes, number: int, halves: tuple[int, ...], offloaded: bool
) -> Running:
    """Return what a rank needs; `halves` are of `Holdings.latest`, if backwards have such."""
    content, all_runs = known.content(number), known.runs(number)
    both = [_chunk(sizes, runs, split=False) for runs in all_runs]
    kept = tuple([own for own, _ in both])
    working = {("B", chunk): needed for chunk, (_, needed) in enumerate(both)}
    if halves:
        kept += tuple(
            [sum([sizes.halves[kind] * times for kind, times in runs]) for runs in all_runs]
        )
        for chunk, runs in enumerate(all_runs):
            working["I", chunk] = _chunk(sizes, runs, split=True)[1]
            working["W", chunk] = halves[chunk]
    sent = tuple([sizes.handed[kind] for kind in content.left])
    received = tuple([sizes.handed[kind] for kind in content.entered])
    passed = tuple(map(add, sent, received)) if offloaded else sent
    return Running(kept, passed, working, *_messages(known, kept, passed, sent, received))


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


def sizes_of(known: Holdings, layout: Layout) -> Sizes:
    """Return what kinds of blocks keep and need in a layout."""
    key = layout.cut, layout.recompute, layout.micro_rows
    found: Sizes | None = known.sizes.get(key)
    if found is None:
        found = known.sizes[key] = _sizes(known, layout)
    return found


def _sizes(known: Holdings, layout: Layout) -> Sizes:
    rows, offloaded = layout.micro_rows, layout.recompute == "offload"
    found = Sizes([], [], [], [], [], [], ([], []), [], {}, [])
    for kind, own in enumerate(known.description.behaviours(layout.cut)):
        under, again = own.kept.at(rows), 0.0
        if kind in known.layers and layout.recompute == "full":
            under, again = own.entered.at(rows), under  # all of it is there while it runs again
        elif kind in known.layers and offloaded:
            under = 0.0
        found.kept.append(round(under))
        found.shared.append(0 if offloaded else round(own.shared.at(rows)))
        found.handed.append(round(own.handed.at(rows)))
        found.halves.append(round(own.left.at(rows)))
        found.under.append(under)
        found.forward.append(own.forward_peak.at(rows))
        found.backward[0].append(own.backward_peak.at(rows) + again)
        found.backward[1].append(own.parted_peak.at(rows) + again)
        found.left.append(own.left.at(rows))
    found.handed.append(0)
    return found


def _chunk(sizes: Sizes, runs: Runs, *, split: bool) -> tuple[int, int]:
    """Return what autograd keeps of a micro-batch in a chunk, and what it needs above that to run.

    While a block runs, those behind it keep nothing yet, or no more: but for what the first half of
    a backward leaves.
    """
    found = sizes.chunks.get((runs, split))
    if found is None:
        behind = sum(sizes.left[kind] * times for kind, times in runs) * split
        kept, under, most = 0, 0.0, 0.0
        for kind, times in runs:
            kept += sizes.kept[kind] * times
            leaves, backward = sizes.left[kind] * split, sizes.backward[split][kind]
            behind -= leaves * times
            # Of equal blocks the last has the most before it, and the first the most behind it.
            first = under + sizes.under[kind] + leaves * (times - 1) + behind + backward
            under += sizes.under[kind] * times
            most = max(most, first, under + behind + backward, under + sizes.forward[kind])
        kept += shared_of(sizes, runs)
        found = sizes.chunks[runs, split] = kept, round(max(most - under, 0))
    return found


def needed(sizes: Sizes, runs: Runs, *, split: bool) -> int:
    """Return what a chunk needs to run backward, or the first half of that, above what it keeps."""
    return _chunk(sizes, runs, split=split)[1]


def shared_of(sizes: Sizes, runs: Runs) -> int:
    """Return what the blocks of a chunk keep together."""
    return max(sizes.shared[kind] for kind, _ in runs)


def kept_of(known: Holdings, layout: Layout, number: int, chunk: int) -> Iterator[tuple[str, int]]:
    """Yield what autograd keeps of a micro-batch in a chunk, by kinds of blocks."""
    sizes = sizes_of(known, layout)
    kinds = Counter[int]()
    for kind, times in known.runs(number)[chunk]:
        kinds[kind] += times
    for kind, times in kinds.items():
        again = kind in known.layers and layout.recompute == "full"
        named = f"{times} x {known.name(kind)}"
        yield f"inputs of {named}" if again else named, sizes.kept[kind] * times
    yield "shared", shared_of(sizes, known.runs(number)[chunk])


def left_of(known: Holdings, layout: Layout, number: int, chunk: int) -> Iterator[tuple[str, int]]:
    """Yield what the first half of a backward of a chunk leaves for the second, by kinds."""
    sizes = sizes_of(known, layout)
    for kind, times in known.runs(number)[chunk]:
        yield f"halves of {times} x {known.name(kind)}", sizes.halves[kind] * times
