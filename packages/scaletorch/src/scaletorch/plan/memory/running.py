"""Bytes on a rank while micro-batches are under way: what is kept of one, and what running needs.

All of it goes by kinds of blocks. What a kind keeps is worked out once for all cuts, and what a
chunk keeps once for all ranks and schedules that have one like it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import add, sub
from typing import NamedTuple

import torch
from torch import Tensor

from ..description import Behaviour
from ..holding import Holdings
from ..holding.live import SPLIT
from ..layout import Layout, Recompute


class Sizes(NamedTuple):
    """Bytes of a micro-batch in blocks, by kinds: a number for every cut of `Holdings.cuts`.

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

    kept: list[Tensor]
    shared: list[Tensor]
    handed: list[Tensor]
    halves: list[Tensor]
    under: list[Tensor]
    forward: list[Tensor]
    backward: tuple[list[Tensor], list[Tensor]]
    left: list[Tensor]
    chunks: dict[object, tuple[Tensor, Tensor]]
    column: list[Tensor]


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
    for number in numbers:
        if number not in found:
            halves = known.latest(layout, number) if split else ()
            found[number] = _running(known, layout, number, halves, layout.recompute == "offload")
    return [found[number] for number in numbers]


def _running(
    known: Holdings, layout: Layout, number: int, halves: tuple[int, ...], offloaded: bool
) -> Running:
    """Return what a rank needs; `halves` are of `Holdings.latest`, if backwards have such."""
    content, all_runs = known.content(number), known.runs(number)
    sizes = sizes_of(known, layout.recompute, layout.micro_rows)
    at = known.place_of_cut(layout)
    both = [chunk_of(sizes, runs, split=False) for runs in all_runs]
    kept = tuple([int(own[at]) for own, _ in both])
    working = {("B", chunk): int(needed[at]) for chunk, (_, needed) in enumerate(both)}
    if halves:
        kept += tuple(
            [
                sum([int(sizes.halves[kind][at]) * times for kind, times in runs])
                for runs in all_runs
            ]
        )
        for chunk, runs in enumerate(all_runs):
            working["I", chunk] = int(chunk_of(sizes, runs, split=True)[1][at])
            working["W", chunk] = halves[chunk]
    sent = tuple([int(sizes.handed[kind][at]) for kind in content.left])
    received = tuple([int(sizes.handed[kind][at]) for kind in content.entered])
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


def sizes_of(known: Holdings, recompute: Recompute, rows: int) -> Sizes:
    """Return what kinds of blocks keep and need in all cuts."""
    found: Sizes | None = known.sizes.get((recompute, rows))
    if found is None:
        found = known.sizes[recompute, rows] = _sizes(known, recompute, rows)
    return found


def _sizes(known: Holdings, recompute: Recompute, rows: int) -> Sizes:
    offloaded = recompute == "offload"
    cuts = known.cuts(recompute == "selective")
    behaviours = [known.description.cuts[cut] for cut in cuts]
    found = Sizes([], [], [], [], [], [], ([], []), [], {}, [])
    nothing = torch.zeros(len(cuts), dtype=torch.float64)
    for kind, own in enumerate(zip(*behaviours, strict=True)):
        under, again = _of_all(own, "kept", rows), nothing
        if kind in known.layers and recompute == "full":
            # All of it is there while it runs again.
            under, again = _of_all(own, "entered", rows), under
        elif kind in known.layers and offloaded:
            under = nothing
        found.kept.append(_rounded(under))
        found.shared.append(_rounded(nothing if offloaded else _of_all(own, "shared", rows)))
        found.handed.append(_rounded(_of_all(own, "handed", rows)))
        found.under.append(under)
        found.forward.append(_of_all(own, "forward_peak", rows))
        found.backward[0].append(_of_all(own, "backward_peak", rows) + again)
        found.backward[1].append(_of_all(own, "parted_peak", rows) + again)
        found.left.append(_of_all(own, "left", rows))
        found.halves.append(_rounded(found.left[-1]))
    found.handed.append(_rounded(nothing))
    return found


def _of_all(kind: Sequence[Behaviour], name: str, rows: int) -> Tensor:
    return torch.tensor([getattr(own, name).at(rows) for own in kind], dtype=torch.float64)


def _rounded(numbers: Tensor) -> Tensor:
    return numbers.round().long()


def chunk_of(sizes: Sizes, runs: Runs, *, split: bool) -> tuple[Tensor, Tensor]:
    """Return what autograd keeps of a micro-batch in a chunk, and what it needs above that to run.

    While a block runs, those behind it keep nothing yet, or no more: but for what the first half of
    a backward leaves.

    Args:
        sizes: Of the blocks.
        runs: The chunk's blocks.
        split: Whether it runs the first half of a backward, and not a whole one.
    """
    found = sizes.chunks.get((runs, split))
    if found is None:
        nothing = torch.zeros_like(sizes.under[0])
        behind = sum([sizes.left[kind] * times for kind, times in runs], nothing) * split
        kept, under, most = shared_of(sizes, runs), nothing, nothing
        for kind, times in runs:
            kept = kept + sizes.kept[kind] * times
            leaves, backward = sizes.left[kind] * split, sizes.backward[split][kind]
            behind = behind - leaves * times
            # Of equal blocks the last has the most before it, and the first the most behind it.
            first = under + sizes.under[kind] + leaves * (times - 1) + behind + backward
            under = under + sizes.under[kind] * times
            last = torch.maximum(under + behind + backward, under + sizes.forward[kind])
            most = torch.maximum(torch.maximum(most, first), last)
        found = sizes.chunks[runs, split] = kept, _rounded((most - under).clamp(min=0))
    return found


def shared_of(sizes: Sizes, runs: Runs) -> Tensor:
    """Return what the blocks of a chunk keep together."""
    return torch.stack([sizes.shared[kind] for kind, _ in runs]).amax(0)


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
