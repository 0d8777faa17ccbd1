"""Bytes on the ranks of a layout: what `parallelize` and `shard_optimizer` keep, and autograd."""

from __future__ import annotations

from typing import NamedTuple

from ..description import Description
from ..estimate import Memory
from ..holding import Holdings
from ..holding.buckets import Bucket, Buckets, Optimizer
from ..holding.live import Live, fullest, most_live
from ..layout import Layout
from .running import running

SPLIT = ("zb_h1", "zb_v", "dualpipe_v")  # schedules whose backwards may come in two halves


class State(NamedTuple):
    """Bytes of parameters and of what goes with them."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0

    def plus(self, other: State) -> State:
        """Return the sum."""
        return State(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, number: int) -> State:
        """Return so many of it."""
        return State(*(each * number for each in self))


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
    live = most_live(layout.schedule, layout.grid.pp, layout.micro_batches, layout.chunks)
    ran = running(known, layout)
    held = {number: state(known, layout, number) for number in {*known.numbers(layout)}}
    found: dict[tuple[int, Live], Memory] = {}
    each = list(zip(known.numbers(layout), live, strict=True))
    for number, own in each:
        if (number, own) not in found:
            has, runs = held[number], ran[number]
            buffers = has.buffers + runs.messages + fullest(own, runs.passed)
            kept = fullest(own, runs.kept)
            found[number, own] = Memory(*has[:3], kept, runs.working, buffers)
    return tuple(found[one] for one in each)


def state(
    known: Holdings,
    layout: Layout,
    number: int,
    tp: int | None = None,
    replica: tuple[int, int] = (0, 0),
) -> State:
    """Return what a rank keeps of parameters, gradients and the optimizer's state.

    Args:
        known: Of the description.
        layout: The layout.
        number: Of `known.numbers(layout)`.
        tp: The tp rank, and the ep rank of experts; None is the one that has the most.
        replica: Its place among the ranks that sum its gradients, and those of its experts.
    """
    grid = layout.grid
    split = layout.zero == 2 and layout.schedule in SPLIT
    key = (grid.tp, grid.ep, grid.etp, number, tp, replica, layout.zero, grid.cp * grid.dp, split)
    found: State | None = known.states.get(key)
    if found is None:
        found = _of_ties(known, layout, number, tp)
        for axis, buckets in known.buckets(layout, number, tp).items():
            ranks = grid.edp if axis == "edp" else grid.cp * grid.dp
            own = _of_group(known, buckets, layout, ranks, replica[axis == "edp"])
            found = found.plus(own)
        known.states[key] = found
    return found


def _of_group(known: Holdings, buckets: Buckets, layout: Layout, ranks: int, replica: int) -> State:
    """Return what there is of parameters that are summed over the same ranks."""
    halves = 2 * layout.chunks * (layout.zero == 2 and layout.schedule in SPLIT)
    key = buckets, ranks, replica, layout.zero, halves
    found: State | None = known.groups.get(key)
    if found is None:
        found = State()
        for bucket, times in buckets.each:
            own = _of_bucket(bucket, layout.zero, halves, ranks, replica, known.optimizer)
            found = found.plus(own.times(times))
        if layout.zero >= 2 and ranks > 1:  # one is filled while the one before it travels
            moving = sorted(
                b.elements * _sum_item(b, known.optimizer)
                for b, times in buckets.each
                for _ in range(min(times, 2))
                if b.sharded
            )
            found = found.plus(State(buffers=sum(moving[-2:])))
        known.groups[key] = found
    return found


def _of_bucket(
    bucket: Bucket, zero: int, halves: int, ranks: int, replica: int, optimizer: Optimizer
) -> State:
    """Return what there is of a bucket.

    Args:
        bucket: The bucket.
        zero: Stage of ZeRO.
        halves: Of backwards that may come in two, of all chunks; 0 if none does.
        ranks: That sum it.
        replica: Which of these this is.
        optimizer: What is kept.
    """
    shards = bucket.shards(ranks, replica)
    own, sums = sum(size for size, _ in shards), _sum_item(bucket, optimizer)
    if not bucket.sharded:
        # Sums of another dtype are kept beside the gradients that the optimizer takes.
        item = bucket.item if sums == bucket.item else bucket.item + sums
        state = own * optimizer.moments * (optimizer.item or bucket.item)
        state += optimizer.per_tensor * len(shards)
        return State(own * bucket.item, own * item, state)
    master = max(bucket.item, 4)  # float32 at least
    length = bucket.padded(ranks)
    share = length // ranks
    # Each backward's sum is memory of its own. With ZeRO 2 the first one's of each chunk stays, and
    # of both halves of a backward, if these have parameters of their own in the shard.
    passes = 1
    if zero == 2:
        passes = halves or max(len({chunk for _, chunk in shards}), 1)
    gradients = share * passes * master + (length * sums if zero == 1 else 0)
    state = own * optimizer.moments * (optimizer.item or master)
    state += own * master * (master != bucket.item) + optimizer.per_tensor * len(shards)
    return State((share if zero == 3 else length) * bucket.item, gradients, state)


def _sum_item(bucket: Bucket, optimizer: Optimizer) -> int:
    return optimizer.sum_item or bucket.item


def _of_ties(known: Holdings, layout: Layout, number: int, tp: int | None) -> State:
    """Return what stages with a tied weight need besides: its total, and the others' gradients."""
    grid, buffers, totals = layout.grid, 0, 0
    if not any(others for _, others in known.content(number).ties):
        return State()
    for each in known.parameters(layout, number, tp):
        size = each.elements * each.item
        if each.others:
            buffers += size * each.others
            totals += size if grid.cp * grid.dp > 1 else 0  # beside its bucket
    return State(gradients=totals, buffers=buffers)
