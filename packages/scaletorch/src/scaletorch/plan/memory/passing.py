"""Bytes that come and go in a step: what autograd keeps, what blocks need, messages of stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..holding import Holdings
from ..holding.under_way import UnderWay
from ..layout import Layout

Messages = dict[tuple[str, int], int]  # bytes when an action of a kind and chunk is about to run


def activations(known: Holdings, layout: Layout, number: int, chunk: int) -> int:
    """Return the bytes that autograd keeps of a micro-batch in a chunk until its backward."""
    key = (layout.cut, number, chunk, layout.recompute, layout.micro_rows)
    found: int | None = known.activations.get(key)
    if found is None:
        found = sum(size for _, size in kept_of(known, layout, number, chunk))
        known.activations[key] = found
    return found


def kept_of(known: Holdings, layout: Layout, number: int, chunk: int) -> Iterator[tuple[str, int]]:
    """Yield what autograd keeps of a micro-batch in a chunk, by kinds of blocks.

    A layer that runs again keeps what it was given, and one whose activations the host keeps
    nothing.
    """
    rows, behaviours = layout.micro_rows, known.description.behaviours(layout.cut)
    kinds = Counter[int]()
    for kind, times in known.runs(number)[chunk]:
        kinds[kind] += times
    for kind, times in kinds.items():
        own = behaviours[kind]
        if kind not in known.layers or layout.recompute not in ("full", "offload"):
            yield f"{times} x {known.name(kind)}", round(own.kept.at(rows)) * times
        elif layout.recompute == "full":
            yield f"inputs of {times} x {known.name(kind)}", round(own.entered.at(rows)) * times
    if layout.recompute != "offload":
        yield "shared", max((round(behaviours[kind].shared.at(rows)) for kind in kinds), default=0)


def left_of(known: Holdings, layout: Layout, number: int, chunk: int) -> Iterator[tuple[str, int]]:
    """Yield what the first half of a backward of a chunk leaves for the second, by kinds."""
    behaviours = known.description.behaviours(layout.cut)
    for kind, times in known.runs(number)[chunk]:
        size = round(behaviours[kind].left.at(layout.micro_rows))
        yield f"halves of {times} x {known.name(kind)}", size * times


def passed_on(known: Holdings, layout: Layout, number: int, chunk: int) -> int:
    """Return the bytes of messages that the pipeline keeps of a micro-batch until its backward.

    What a chunk has sent on; what it has received is kept by its first layer, if that is not
    offloaded.
    """
    behaviours = known.description.behaviours(layout.cut)
    content = known.content(number)
    ends = [content.left[chunk]]
    if layout.recompute == "offload":
        ends.append(content.entered[chunk])
    return sum(round(behaviours[kind].handed.at(layout.micro_rows)) for kind in ends if kind >= 0)


def working(
    known: Holdings, layout: Layout, number: int, chunk: int, *, split: bool = False
) -> int:
    """Return the most that a block of a chunk needs while it runs, above what all of them keep.

    While a block runs, those behind it keep nothing yet, or no more: but for what the first half of
    a backward leaves.
    """
    key = (layout.cut, number, chunk, layout.recompute, layout.micro_rows, split)
    found: int | None = known.workings.get(key)
    if found is None:
        runs = known.runs(number)[chunk]
        found = known.workings[key] = _working(known, layout, runs, split)
    return found


def _working(known: Holdings, layout: Layout, runs: Sequence[tuple[int, int]], split: bool) -> int:
    rows, behaviours = layout.micro_rows, known.description.behaviours(layout.cut)
    behind = sum(behaviours[kind].left.at(rows) * times for kind, times in runs) * split
    kept, most = 0.0, 0.0
    for kind, times in runs:
        own, is_layer = behaviours[kind], kind in known.layers
        backward = (own.parted_peak if split else own.backward_peak).at(rows)
        keeps = own.kept.at(rows)
        if is_layer and layout.recompute == "full":  # all of it is there while it runs again
            backward += keeps
            keeps = own.entered.at(rows)
        elif is_layer and layout.recompute == "offload":
            keeps = 0.0
        leaves = own.left.at(rows) * split
        behind -= leaves * times
        # Of equal blocks the last has the most before it, and the first the most behind it.
        first = kept + keeps + leaves * (times - 1) + behind + backward
        kept += keeps * times
        most = max(most, first, kept + behind + backward, kept + own.forward_peak.at(rows))
    return round(max(most - kept, 0))


def messages(known: Holdings, layout: Layout, number: int, moving: Sequence[UnderWay]) -> Messages:
    """Return the bytes of messages between stages that are under way."""
    content = known.content(number)
    sizes = [_handed(known, layout, kinds) for kinds in (content.left, content.entered)]
    if not known.description.early:
        return {(each.kind, each.chunk): sum(map(max, sizes)) for each in moving}
    ways = (sizes[0], sizes[1], sizes[1], sizes[0])
    return {
        (each.kind, each.chunk): sum(
            n * size
            for counts, own in zip(each[2:], ways, strict=True)
            for n, size in zip(counts, own, strict=True)
        )
        for each in moving
    }


def _handed(known: Holdings, layout: Layout, kinds: Sequence[int]) -> list[int]:
    behaviours = known.description.behaviours(layout.cut)
    return [round(behaviours[k].handed.at(layout.micro_rows)) if k >= 0 else 0 for k in kinds]
