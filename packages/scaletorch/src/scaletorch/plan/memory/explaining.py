"""The memory of a rank, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..description import Description
from ..holding import Holdings, Optimizer
from ..holding.live import most_live
from ..layout import Layout
from .ranks import memory, state
from .running import kept_of, running


class Line(NamedTuple):
    """A part of a rank's memory.

    Attributes:
        part: As `Memory` calls it.
        what: What of it.
        bytes: How many.
    """

    part: str
    what: str
    bytes: int


def lines(
    description: Description,
    layout: Layout,
    rank: int | None = None,
    optimizer: Optimizer | None = None,
    *,
    holdings: Holdings | None = None,
) -> tuple[Line, ...]:
    """Return what fills the memory of a rank; the lines add up to `Memory.total`.

    Args:
        description: The model.
        layout: The layout.
        rank: Of the pipeline; None is the fullest.
        optimizer: What is kept for each parameter.
        holdings: Of the same description and optimizer, to work out nothing twice.

    Raises:
        InvalidArgumentError: The model cannot be cut so, or has fewer layers than stages.
    """
    known = holdings or Holdings(description, optimizer)
    if rank is None:
        totals = [each.total for each in memory(description, layout, holdings=known)]
        rank = totals.index(max(totals))
    return tuple(line for line in _lines(known, layout, rank) if line.bytes)


def _lines(known: Holdings, layout: Layout, rank: int) -> Iterator[Line]:
    number = known.numbers(layout)[rank]
    held, own = state(known, layout, number), running(known, layout)[number]
    count = len(known.parameters(layout, number))
    blocks = known.content(number).blocks
    yield Line("parameters", f"{count} tensors of {blocks} blocks", held.parameters)
    yield Line("gradients", f"zero {layout.zero}", held.gradients)
    yield Line("optimizer", known.optimizer.name, held.optimizer)
    kept = [list(kept_of(known, layout, number, chunk)) for chunk in range(layout.chunks)]
    live = most_live(layout.schedule, layout.grid.pp, layout.micro_batches, layout.chunks)[rank]
    fullest = max(live, key=lambda now: sum(n * s for n, s in zip(now, own.kept, strict=True)))
    for chunk, (times, parts) in enumerate(zip(fullest, kept, strict=True)):
        where = f"chunk {chunk}: " if layout.chunks > 1 else ""
        for what, size in parts:
            yield Line("activations", f"{where}{times} micro-batches of {what}", times * size)
    yield Line("working", "the block that needs the most while it runs", own.working)
    yield Line("buffers", "gradients on their way", held.buffers)
    yield Line("buffers", "messages between stages", own.messages)
    sent = max(sum(n * s for n, s in zip(now, own.passed, strict=True)) for now in live)
    yield Line("buffers", "what was sent on, until its backward", sent)
