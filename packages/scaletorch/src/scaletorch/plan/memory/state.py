"""Bytes that stay from step to step: parameters, summed gradients, the optimizer's state."""

from __future__ import annotations

from operator import add
from typing import NamedTuple

from ..gradients.brought import brings
from ..gradients.ties import of_ties
from ..holding import Holdings
from ..holding.buckets import Bucket, Buckets, Optimizer
from ..layout import Layout


class State(NamedTuple):
    """Bytes of parameters and of what goes with them."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0

    def plus(self, other: State) -> State:
        """Return the sum."""
        return State._make(map(add, self, other))


def state(
    known: Holdings,
    layout: Layout,
    number: int,
    tp: int | None = None,
    replica: tuple[int, int] | None = None,
    halves: tuple[bool, ...] = (),
) -> State:
    """Return what a rank keeps of parameters, gradients and the optimizer's state.

    Args:
        known: Of the description.
        layout: The layout.
        number: Of `known.numbers(layout)`.
        tp: The tp rank, and the ep rank of experts; None is the one that has the most.
        replica: Its place among the ranks that sum its gradients, and those of its experts; None is
            that with the most.
        halves: Of `halved`, of its place in the pipeline.
    """
    grid = layout.grid
    halves = halves if layout.zero == 2 else ()
    replica = replica or known.replica(layout, number, halves)
    whole = not brings(known, layout)  # gradients that nobody follows through a step
    key = (
        grid.tp, grid.ep, grid.etp, number, tp, replica, layout.zero, grid.cp * grid.dp, halves,
        whole,
    )  # fmt: skip
    found: State | None = known.states.get(key)
    if found is None:
        totals, others = of_ties(known, layout, number, tp)
        found = State(gradients=totals, buffers=others * whole)
        for axis, buckets in known.buckets(layout, number, tp).items():
            ranks = grid.edp if axis == "edp" else grid.cp * grid.dp
            place = replica[axis == "edp"]
            found = found.plus(_of_group(known, buckets, layout.zero, halves, ranks, place))
            if whole and ranks > 1:
                found = found.plus(State(buffers=_moving(known, buckets, layout.zero, ranks)))
        known.states[key] = found
    return found


def _of_group(
    known: Holdings, buckets: Buckets, zero: int, halves: tuple[bool, ...], ranks: int, replica: int
) -> State:
    """Return what there is of parameters that are summed over the same ranks."""
    key = buckets, ranks, replica, zero, halves
    found: State | None = known.groups.get(key)
    if found is None:
        parameters = gradients = optimizer = 0
        for bucket, times in buckets.each:
            own = _of_bucket(known, bucket, zero, halves, ranks, replica)
            parameters += own.parameters * times
            gradients += own.gradients * times
            optimizer += own.optimizer * times
        found = known.groups[key] = State(parameters, gradients, optimizer)
    return found


def _moving(known: Holdings, buckets: Buckets, zero: int, ranks: int) -> int:
    """Return what is whole of what is shared: one is filled while the one before it travels."""
    if zero == 3:
        return _gathered(buckets, ranks)
    if zero < 2:
        return 0
    sizes = sorted(
        b.elements * b.sum_item(known.optimizer)
        for b, times in buckets.each
        for _ in range(min(times, 2))
        if b.sharded
    )
    return sum(sizes[-2:])


def _gathered(buckets: Buckets, ranks: int) -> int:
    """Return what `fully_shard` has whole while a layer runs backward, at most.

    All that is outside of layers, the layer itself, the one that is fetched ahead, gradients, and
    those of the layer behind it on their way.
    """
    whole = [(bucket.padded(ranks) * bucket.item, bucket.gathered) for bucket, _ in buckets.each]
    layers = max((size for size, of in whole if of == "layer"), default=0)
    return sum(size for size, of in whole if of == "rest") + 4 * layers


def _of_bucket(
    known: Holdings, bucket: Bucket, zero: int, halves: tuple[bool, ...], ranks: int, replica: int
) -> State:
    """Return what there is of a bucket, of which other ranks have one like it."""
    key = bucket, zero, halves, ranks, replica
    found: State | None = known.groups.get(key)
    if found is None:
        found = known.groups[key] = _shares(bucket, zero, halves, ranks, replica, known.optimizer)
    return found


def _shares(
    bucket: Bucket,
    zero: int,
    halves: tuple[bool, ...],
    ranks: int,
    replica: int,
    optimizer: Optimizer,
) -> State:
    """Return what there is of a bucket.

    Args:
        bucket: The bucket.
        zero: Stage of ZeRO.
        halves: Whether the first backward of each chunk comes in two.
        ranks: That sum it.
        replica: Which of these this is.
        optimizer: What is kept.
    """
    sums = bucket.sum_item(optimizer)
    if not bucket.sharded:
        own, tensors = bucket.elements, len(bucket.sizes)
        # Sums of another dtype are kept beside the gradients that the optimizer takes.
        item = bucket.item if sums == bucket.item else bucket.item + sums
        state = own * optimizer.moments * (optimizer.item or bucket.item)
        state += optimizer.per_tensor * tensors
        return State(own * bucket.item, own * item, state)
    shards = bucket.shards(ranks, replica)
    own = sum([size for size, _ in shards])
    master = bucket.master_item(zero)
    length = bucket.padded(ranks)
    share = length // ranks
    # Each backward's sum is memory of its own. With ZeRO 2 that of the first one stays which makes
    # any gradient of the shard: of each chunk, and of both halves of a backward.
    passes = max(len(bucket.made(ranks, replica, halves)), 1) if zero == 2 else 1
    gradients = share * passes * master + (length * sums if zero == 1 else 0)
    state = own * optimizer.moments * (optimizer.item or master)
    state += own * master * (master != bucket.item) + optimizer.per_tensor * len(shards)
    return State((share if zero == 3 else length) * bucket.item, gradients, state)
