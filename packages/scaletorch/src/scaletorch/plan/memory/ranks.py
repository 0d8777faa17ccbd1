"""Bytes on the ranks of a layout: what `parallelize` and `shard_optimizer` keep, and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from ..description import Description
from ..estimate import Memory
from ..holding import Holdings, Optimizer
from ..layout import Layout
from .busy import Busy, Moment, busy
from .running import Running, running
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
    share an optimizer's state the one with the most gradients, or the first.

    Args:
        description: The model.
        layout: The layout; with `zero` 3 as `fully_shard` of torch has it, a block at a time.
        optimizer: What is kept for each parameter.
        holdings: Of the same description and optimizer, to work out nothing twice.

    Raises:
        InvalidArgumentError: The model cannot be cut so, or has fewer layers than stages.
    """
    return ranks_hold(holdings or Holdings(description, optimizer), layout)


def ranks_hold(known: Holdings, layout: Layout) -> tuple[Memory, ...]:
    """Return `memory` of a layout."""
    ranks = busy(known, layout)
    ran = running(known, layout, [each[:2] for each in ranks.each])
    found = [held_by(known, layout, own, each) for own, each in zip(ran, ranks.each, strict=True)]
    return tuple([found[place] for place in ranks.places])


def held_by(known: Holdings, layout: Layout, own: Running, busy: Busy) -> Memory:
    """Return `memory` of one rank."""
    total, moment = fullest_moment(own, busy.moments)
    has = state(known, layout, busy.number, halves=busy.halves)
    kept, working = sum(map(mul, moment.kept, own.kept)), own.working[moment.action]
    made = sum(map(mul, moment.made, own.brought))
    gradients = has.gradients - sum(own.brought) + made
    buffers = has.buffers + total - kept - working - made
    return Memory(has.parameters, gradients, has.optimizer, kept, working, buffers)


def fullest_moment(own: Running, moments: Sequence[Moment]) -> tuple[int, Moment]:
    """Return the most bytes of micro-batches under way, and of gradients brought, and when."""
    sizes, working = own.sizes, own.working
    each = [
        sum(map(mul, counts, sizes)) + sum(map(mul, made, own.brought)) + working[action]
        for action, _, counts, made in moments
    ]
    most = max(each)
    return most + own.always, moments[each.index(most)]


def summed_gradients(description: Description, layout: Layout) -> tuple[int, ...]:
    """Return the bytes of gradients on each rank of the pipeline when a step has made all.

    Raises:
        InvalidArgumentError: The model cannot be cut so, or has fewer layers than stages.
    """
    known = Holdings(description)
    ranks = busy(known, layout)
    found = [state(known, layout, r.number, halves=r.halves).gradients for r in ranks.each]
    return tuple([found[place] for place in ranks.places])


def kept_by_autograd(description: Description, layout: Layout) -> tuple[int, ...]:
    """Return the most bytes that autograd keeps on each rank of the pipeline.

    Not the same as `Memory.activations`, which are those of when a rank holds the most, and have
    what halves of backwards leave.

    Raises:
        InvalidArgumentError: The model cannot be cut so, or has fewer layers than stages.
    """
    known = Holdings(description)
    ranks = busy(known, layout)
    ran = running(known, layout, [each[:2] for each in ranks.each])
    found = [
        max(sum(map(mul, m.kept, own.kept[: layout.chunks])) for m in each.moments)
        for own, each in zip(ran, ranks.each, strict=True)
    ]
    return tuple([found[place] for place in ranks.places])
