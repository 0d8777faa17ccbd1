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
from ..holding.brought import END, Brought, brings, brought
from ..holding.live import SPLIT
from ..layout import Layout


class Sizes(NamedTuple):
    """Bytes of a micro-batch in blocks, by kinds.

    Attributes:
        kept: What autograd keeps of one: its input, if layers run again; nothing, if the host does.
        entered: What enters one, and so the gradient that it hands back.
        shared: What all of a chunk keep together, once.
        handed: What one hands on. One more, 0, is at its end: kind -1 of `Content` is none.
        halves: What the first half of a backward leaves of one for the second.
        under: What one keeps below those behind it while these run.
        forward: What one needs above that while it runs forward.
        backward: The same backward, in one or in the first half of it.
        left: `halves`, not rounded.
        chunks: What a chunk needs, by the runs of its blocks.
        column: Of `weights`.
    """

    kept: list[int]
    entered: list[float]
    shared: list[int]
    handed: list[int]
    halves: list[int]
    under: list[float]
    forward: list[float]
    backward: tuple[list[float], list[float]]
    left: list[float]
    chunks: dict[object, int]
    column: list[int]


Runs = tuple[tuple[int, int], ...]  # kinds of blocks, and how many follow one another
Gradients = tuple[int, ...]  # bytes of a block of each run, if an action brings them
Action = tuple[str, int, bool]  # kind and chunk, and whether it brings gradients


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
    sizes = None
    for number in numbers:
        if number not in found:
            sizes = sizes or sizes_of(known, layout)
            own = brought(known, layout, number) if bringing else None
            found[number] = _running(known, layout, sizes, number, own)
    return [found[number] for number in numbers]


def _running(
    known: Holdings, layout: Layout, sizes: Sizes, number: int, own: Brought | None
) -> Running:
    """Return what a rank needs; `own` is what it is brought, if it is."""
    content, all_runs = known.content(number), known.runs(number)
    split, offloaded = layout.schedule in SPLIT, layout.recompute == "offload"
    kept = tuple([kept_in(sizes, runs) for runs in all_runs])
    if split:
        kept += tuple(
            [sum([sizes.halves[kind] * times for kind, times in runs]) for runs in all_runs]
        )
    working = {
        (kind, chunk, first): works(known, layout, sizes, number, (kind, chunk, first), own)
        for chunk in range(len(all_runs))
        for kind in ("F", "B", *"IW" * split)
        for first in ((False, True) if own and kind != "F" else (False,))
    }
    working[END, 0, False] = 0
    sent = tuple([sizes.handed[kind] for kind in content.left])
    received = tuple([sizes.handed[kind] for kind in content.entered])
    passed = tuple(map(add, sent, received)) if offloaded else sent
    flags = own.flags if own else ()
    return Running(kept, passed, working, *_messages(known, kept, passed, sent, received), flags)


def works(
    known: Holdings,
    layout: Layout,
    sizes: Sizes,
    number: int,
    action: Action,
    own: Brought | None,
) -> int:
    """Return what an action needs above what all keep, with the gradients that it brings."""
    kind, chunk, first = action
    if kind == END:
        return 0
    runs = known.runs(number)[chunk]
    if kind == "W":
        return _ending(known, layout, sizes, number, chunk, own if first else None)
    comes: Gradients = ()
    if own is not None and first:
        comes = tuple(early + late * (kind == "B") for early, late in own.runs[chunk])
    return needed(sizes, runs, kind, comes)


def _ending(
    known: Holdings, layout: Layout, sizes: Sizes, number: int, chunk: int, own: Brought | None
) -> int:
    """Return what second halves need: each frees what the first has left, and makes a gradient."""
    largest = known.latest(layout, number)[chunk]
    if own is None:
        return largest
    runs = known.runs(number)[chunk]
    left = sum(sizes.halves[kind] * times for kind, times in runs)
    made = sum(late * n for (_, late), (_, n) in zip(own.runs[chunk], runs, strict=True))
    return max(largest, made - left)


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
    found = Sizes([], [], [], [], [], [], [], ([], []), [], {}, [])
    for kind, own in enumerate(known.description.behaviours(layout.cut)):
        under, again = own.kept.at(rows), 0.0
        if kind in known.layers and layout.recompute == "full":
            under, again = own.entered.at(rows), own.again.at(rows)
        elif kind in known.layers and offloaded:
            under = 0.0
        found.kept.append(round(under))
        found.entered.append(own.entered.at(rows))
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


def kept_in(sizes: Sizes, runs: Runs) -> int:
    """Return what autograd keeps of a micro-batch in a chunk."""
    return sum([sizes.kept[kind] * times for kind, times in runs]) + shared_of(sizes, runs)


def needed(sizes: Sizes, runs: Runs, action: str, comes: Gradients = ()) -> int:
    """Return what a chunk needs to run an action, above what it keeps.

    While a block runs, those behind it keep nothing yet, or no more: but for what the first half of
    a backward leaves, gradients that are brought, and the gradient of its output. Of the last block
    that is a message, or a loss's.

    Args:
        sizes: Of blocks.
        runs: Of the chunk.
        action: "F", "B" or "I".
        comes: Gradients that the action brings, if it does.
    """
    key = runs, action, comes
    found = sizes.chunks.get(key)
    if found is None:
        found = sizes.chunks[key] = _needed(sizes, runs, action, comes)
    return found


def _needed(sizes: Sizes, runs: Runs, action: str, comes: Gradients) -> int:
    under, most = 0.0, 0.0
    brought = comes or (0,) * len(runs)
    leaves = [
        (sizes.left[k] if action == "I" else 0) + g for (k, _), g in zip(runs, brought, strict=True)
    ]
    behind = sum(each * times for each, (_, times) in zip(leaves, runs, strict=True))
    handing = [*(sizes.entered[kind] for kind, _ in runs[1:]), 0.0]
    for (kind, times), own, handed in zip(runs, leaves, handing, strict=True):
        behind -= own * times
        # Of equal blocks the last has the most before it, and the first the most behind it.
        for place in {0, max(times - 2, 0), times - 1}:
            now = under + sizes.under[kind] * (place + 1)
            if action == "F":
                now += sizes.forward[kind]
            else:
                now += sizes.backward[action == "I"][kind] + behind + own * (times - 1 - place)
                now += handed if place == times - 1 else sizes.entered[kind]
            most = max(most, now)
        under += sizes.under[kind] * times
    return round(max(most - under, 0))


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
