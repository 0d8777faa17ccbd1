"""Bytes on a rank while micro-batches are under way: what is kept of one, and what running needs.

All of it goes by kinds of blocks. What a kind keeps is worked out once for a cut, and what a chunk
keeps once for all ranks and schedules that have one like it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import add
from typing import NamedTuple

from ..holding import Holdings
from ..layout import Layout


class Sizes(NamedTuple):
    """Bytes of a micro-batch in blocks, by kinds.

    Attributes:
        kept: What autograd keeps of one: its input, if layers run again; nothing, if the host does.
        shared: What all of a chunk keep together, once.
        handed: What one hands on. One more, 0, is at its end: kind -1 of `Content` is none.
        under: What one keeps below those behind it while these run.
        peak: What one needs while it runs, above that.
        chunks: `kept` and `needed` of chunks, by the runs of their blocks.
    """

    kept: list[int]
    shared: list[int]
    handed: list[int]
    under: list[float]
    peak: list[float]
    chunks: dict[object, tuple[int, float]]


class Running(NamedTuple):
    """Bytes of a rank of the pipeline.

    Attributes:
        kept: Of a micro-batch until its backward, by chunk.
        passed: Of messages that the pipeline keeps of a micro-batch as long, by chunk.
        working: Of the block that needs the most while it runs, above what all keep.
        messages: Of gradients between stages: one that has come, and one on its way.
    """

    kept: tuple[int, ...]
    passed: tuple[int, ...]
    working: int
    messages: int


def running(known: Holdings, layout: Layout) -> dict[int, Running]:
    """Return what ranks need for micro-batches, by their numbers.

    What a chunk has sent on is kept; what it has received is kept by its first layer, if that is
    not offloaded.
    """
    key = layout.cut, layout.recompute, layout.micro_rows
    found: dict[int, Running] = known.running.setdefault(key, {})
    for number in known.numbers(layout):
        if number not in found:
            found[number] = _running(known, layout, number)
    return found


def _running(known: Holdings, layout: Layout, number: int) -> Running:
    sizes, content = sizes_of(known, layout), known.content(number)
    kept, needed = zip(*[_chunk(sizes, runs) for runs in known.runs(number)], strict=True)
    sent = [sizes.handed[kind] for kind in content.left]
    received = [sizes.handed[kind] for kind in content.entered]
    passed = map(add, sent, received) if layout.recompute == "offload" else sent
    return Running(kept, tuple(passed), round(max(needed)), max(sent) + max(received))


def sizes_of(known: Holdings, layout: Layout) -> Sizes:
    """Return what kinds of blocks keep and need in a layout."""
    key = layout.cut, layout.recompute, layout.micro_rows
    found: Sizes | None = known.sizes.get(key)
    if found is None:
        found = known.sizes[key] = _sizes(known, layout)
    return found


def _sizes(known: Holdings, layout: Layout) -> Sizes:
    rows, offloaded = layout.micro_rows, layout.recompute == "offload"
    found = Sizes([], [], [], [], [], {})
    for kind, own in enumerate(known.description.behaviours(layout.cut)):
        under, backward = own.kept.at(rows), own.backward_peak.at(rows)
        if kind in known.layers and layout.recompute == "full":
            under, backward = (
                own.entered.at(rows),
                backward + under,
            )  # all of it, while it runs again
        elif kind in known.layers and offloaded:
            under = 0.0
        found.kept.append(round(under))
        found.shared.append(0 if offloaded else round(own.shared.at(rows)))
        found.handed.append(round(own.handed.at(rows)))
        found.under.append(under)
        found.peak.append(max(own.forward_peak.at(rows), backward))
    found.handed.append(0)
    return found


def _chunk(sizes: Sizes, runs: Sequence[tuple[int, int]]) -> tuple[int, float]:
    """Return what autograd keeps of a micro-batch in a chunk, and what it needs above that to run.

    While a block runs, those behind it in the chunk keep nothing yet, or no more.
    """
    found = sizes.chunks.get(runs)
    if found is None:
        kept, under, most = 0, 0.0, 0.0
        for kind, times in runs:  # of equal blocks the last has the most before it
            kept += sizes.kept[kind] * times
            under += sizes.under[kind] * times
            most = max(most, under + sizes.peak[kind])
        kept += max(sizes.shared[kind] for kind, _ in runs)
        found = sizes.chunks[runs] = kept, max(most - under, 0)
    return found


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
    yield "shared", max(sizes.shared[kind] for kind in kinds)
