"""Bytes on the ranks of a layout: what `parallelize` and `shard_optimizer` keep, and autograd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..description import Description
from ..estimate import Memory
from ..holding import Holdings
from ..holding.buckets import Bucket, Optimizer
from ..holding.live import SPLIT, Before, Live, fullest, most_live
from ..holding.under_way import UnderWay, under_way
from ..layout import Layout


Messages = dict[tuple[str, int], int]  # bytes when an action of a kind and chunk is about to run


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
    numbers = known.numbers(layout)
    each_of = {number: fixed(known, layout, number) for number in {*numbers}}
    found: dict[tuple[int, Live, tuple[UnderWay, ...]], Memory] = {}
    places = list(zip(numbers, live, under_way(layout), strict=True))
    for each in places:
        if each not in found:
            number, own, moving = each
            found[each] = _memory(each_of[number], own, messages(known, layout, number, moving))
    return tuple(found[each] for each in places)


class Fixed(NamedTuple):
    """What a rank holds whatever micro-batches are under way, and of each of them, by chunk."""

    state: State
    kept: list[int]  # of a micro-batch, then of a half
    passed: list[int]
    working: dict[str, list[int]]  # while an action of a kind runs


def fixed(known: Holdings, layout: Layout, number: int) -> Fixed:
    """Return what a rank of this number holds whatever micro-batches are under way."""
    chunks = range(layout.chunks)
    kept = [activations(known, layout, number, chunk) for chunk in chunks]
    passed = [passed_on(known, layout, number, chunk) for chunk in chunks]
    held = state(known, layout, number)
    running = {"B": [working(known, layout, number, chunk) for chunk in chunks]}
    if layout.schedule in SPLIT:
        kept += [sum(size for _, size in left_of(known, layout, number, c)) for c in chunks]
        running["I"] = [working(known, layout, number, c, split=True) for c in chunks]
        running["W"] = known.latest(layout, number)
    return Fixed(held, kept, passed, running)


def fullest_before(own: Fixed, live: Live, moving: Messages) -> tuple[Before, int, int]:
    """Return when a rank holds the most, what works then, and the bytes of messages."""

    def size(before: Before) -> tuple[int, int]:
        key = before.kind, before.chunk
        messages = moving[key] if key in moving else max(moving.values())
        return own.working[before.kind][before.chunk], messages

    if len(live) == 1:
        return live[0], *size(live[0])
    return max(
        ((before, *size(before)) for before in live),
        key=lambda each: sum(_sizes(own, each[0])) + each[1] + each[2],
    )


def _memory(own: Fixed, live: Live, moving: Messages) -> Memory:
    before, running, messages = fullest_before(own, live, moving)
    kept, passed = _sizes(own, before)
    return Memory(*own.state[:3], kept, running, own.state.buffers + passed + messages)


def _sizes(own: Fixed, before: Before) -> tuple[int, int]:
    return fullest(before.moments, own.kept), fullest(before.moments, own.passed)


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
            place = replica[axis == "edp"]
            own = _of_group(buckets, layout, ranks, place, known.optimizer)
            found = found.plus(own)
        known.states[key] = found
    return found


def _of_group(
    buckets: Sequence[tuple[Bucket, int]],
    layout: Layout,
    ranks: int,
    replica: int,
    optimizer: Optimizer,
) -> State:
    total = State()
    for bucket, times in buckets:
        total = total.plus(_of_bucket(bucket, layout, ranks, replica, optimizer).times(times))
    moving = sorted(
        b.elements * _sum_item(b, optimizer)
        for b, times in buckets
        for _ in range(min(times, 2))
        if b.sharded
    )
    if layout.zero >= 2 and ranks > 1:  # one is filled while the one before it travels
        total = total.plus(State(buffers=sum(moving[-2:])))
    return total


def _of_bucket(
    bucket: Bucket, layout: Layout, ranks: int, replica: int, optimizer: Optimizer
) -> State:
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
    zero, split = layout.zero, layout.schedule in SPLIT
    passes = 1
    if zero == 2:
        passes = 2 * layout.chunks if split else max(len({chunk for _, chunk in shards}), 1)
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


def _working(
    known: Holdings, layout: Layout, runs: Sequence[tuple[int, int]], split: bool
) -> int:
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


def messages(
    known: Holdings, layout: Layout, number: int, moving: Sequence[UnderWay]
) -> Messages:
    """Return the bytes of messages between stages that are under way."""
    content = known.content(number)
    sizes = [_handed(known, layout, kinds) for kinds in (content.left, content.entered)]
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
