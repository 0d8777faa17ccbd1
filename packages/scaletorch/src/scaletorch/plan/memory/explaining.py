"""The memory of a rank, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import mul
from typing import NamedTuple

from ..description import Description
from ..holding import Holdings, Optimizer
from ..layout import Layout
from .busy import busy
from .ranks import fullest_moment, memory
from .running import kept_of, left_of, running
from .state import state


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
    ranks = busy(known, layout)
    place = ranks.each[ranks.places[rank]]
    held = state(known, layout, number, halves=place.halves)
    (own,) = running(known, layout, [place[:2]])
    total, (action, now, _, flags) = fullest_moment(own, place.moments)
    made = sum(map(mul, flags, own.brought))
    count = len(known.parameters(layout, number))
    blocks = known.content(number).blocks
    yield Line("parameters", f"{count} tensors of {blocks} blocks", held.parameters)
    gradients = held.gradients - sum(own.brought) + made
    yield Line("gradients", f"zero {layout.zero}", gradients)
    yield Line("optimizer", known.optimizer.name, held.optimizer)
    kept, passed = sum(map(mul, now, own.kept)), sum(map(mul, now, own.passed))
    working = own.working[action]
    yield from _kept(known, layout, number, now)
    whole = ", and blocks that are whole" * (layout.zero == 3)
    yield Line("working", f"the block that needs the most while it runs{whole}", working)
    yield Line("buffers", "gradients on their way", held.buffers)
    yield Line("buffers", "messages between stages", total - kept - passed - working - made)
    yield Line("buffers", "what was sent on, until its backward", passed)


def _kept(known: Holdings, layout: Layout, number: int, now: Sequence[int]) -> Iterator[Line]:
    """Yield what is kept by chunk: of whole micro-batches, and of halves."""
    chunks = range(layout.chunks)
    kept = [list(kept_of(known, layout, number, chunk)) for chunk in chunks]
    kept += [list(left_of(known, layout, number, chunk)) for chunk in chunks]
    for place, (times, parts) in enumerate(zip(now, kept, strict=False)):
        where = f"chunk {place % layout.chunks}: " if layout.chunks > 1 else ""
        for what, size in parts:
            yield Line("activations", f"{where}{times} micro-batches of {what}", times * size)
