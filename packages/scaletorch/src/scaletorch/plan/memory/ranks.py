"""Bytes on the ranks of a layout: what `parallelize` and `shard_optimizer` keep, and autograd."""

from __future__ import annotations

from operator import mul

from ..description import Description
from ..estimate import Memory
from ..holding import Holdings, Optimizer
from ..layout import Layout
from .busy import Busy, busy, fullest_moment
from .running import running
from .state import state


def memory(
    description: Description,
    layout: Layout,
    optimizer: Optimizer | None = None,
    *,
    holdings: Holdings | None = None,
) -> tuple[Memory, ...]:
    """Return the bytes of the fullest rank at each place of the pipeline.

    Of ranks that differ in tp or ep alone it is the one with the most parameters; of those that
    share an optimizer's state the first, whose shards are never the smaller ones.

    Args:
        description: The model.
        layout: The layout; with `zero` 3 as `fully_shard` of torch has it, a block at a time.
        optimizer: What is kept for each parameter.
        holdings: Of the same description and optimizer, to work out nothing twice.

    Raises:
        InvalidArgumentError: The model cannot be cut so, or has fewer layers than stages.
    """
    known = holdings or Holdings(description, optimizer)
    ran = running(known, layout)
    found: dict[Busy, Memory] = {}
    places = busy(known, layout)
    for place in places:
        if place not in found:
            own = fullest_moment(known, ran[place.number], place)
            has = state(known, layout, place.number, halves=place.halves)
            buffers = has.buffers + own.passed + own.messages
            found[place] = Memory(*has[:3], own.kept, own.working, buffers)
    return tuple([found[place] for place in places])


def kept_by_autograd(description: Description, layout: Layout) -> tuple[int, ...]:
    """Return the most bytes that autograd keeps on each rank of the pipeline.

    Not the same as `Memory.activations`, which are those of when a rank holds the most, and have
    what halves of backwards leave.

    Raises:
        InvalidArgumentError: The model cannot be cut so, or has fewer layers than stages.
    """
    known = Holdings(description)
    ran = running(known, layout)
    return tuple(
        max(
            sum(map(mul, moment.kept, ran[own.number].kept[: layout.chunks]))
            for moment in own.moments
        )
        for own in busy(known, layout)
    )
