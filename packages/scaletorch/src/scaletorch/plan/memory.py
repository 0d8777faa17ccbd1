"""Memory on the ranks of a layout, in closed form from the description of each block.

A rank holds its parameters, gradients and optimizer state, the activations of the live
micro-batches, the temporary memory of the running block that needs the most, gradient buckets in
flight, and messages between stages. On real ranks the total is within 3 % of this sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from math import inf
from operator import mul
from typing import NamedTuple

from .description import Description, Layout
from .estimate import Memory
from .facts import Facts, Group, Optimizer, Runs, alive, begun, once_for

IN_FLIGHT = 8  # messages in flight; copied from the pipeline runtime, which imports torch
OPEN = 2  # buckets that a backward with ZeRO 2 fills before the first one is sent
GATHERED = 4  # unsharded layers with ZeRO 3: the running one, the next, and gradients of two


class State(NamedTuple):
    """Bytes of a rank's parameters, gradients and optimizer state."""

    parameters: int = 0  # parameter shards
    gradients: int = 0  # gradient buffers that persist across steps
    optimizer: int = 0  # optimizer state and master weights
    brought: int = 0  # gradients, or their shards, that the first backward makes
    first: int = 0  # those of its first half, if it is split
    second: int = 0  # those of its second half
    again: int = 0  # further shards that each later backward makes
    last: int = 0  # shards that only the last backward makes
    start: int = 0  # unsharded buckets or parameters when a backward begins
    inside: int = 0  # the same while its layers run
    bucket: int = 0  # one gradient bucket
    whole: int = 0  # all gradients that go through buckets
    opened: int = 0  # buckets that the first half of a split backward fills before any is sent
    late: int = 0  # the same of its second half
    single: int = 0  # the largest gradient
    shared: int = 0  # of a bucket with gradients of two chunks, those of the other one
    ending: int = 0  # receive buffers of the last buckets
    ties: int = 0  # gradients of tied weights from other stages at the end of a step

    def arrived(self, begun: tuple[int, int, int]) -> int:
        """Return the bytes of gradients after earlier backwards, if each chunk had all of them."""
        whole, first, second = begun
        return self.brought * whole + self.first * first + self.second * second


@once_for(
    lambda _, layout, number: (
        layout.grid.tp, layout.grid.ep, layout.grid.etp, layout.grid.cp * layout.grid.dp, number,
        layout.zero,
    )
)  # fmt: skip
def state(facts: Facts, layout: Layout, number: int) -> State:
    """Return the parameter, gradient and optimizer bytes of ranks with a number."""
    grid = layout.grid
    each = [
        _state(facts, layout, group, grid.edp if group.axis == "edp" else grid.cp * grid.dp)
        for group in facts.groups(layout, number)
    ]
    return State(*map(sum, zip(*each, strict=True)))


def _state(facts: Facts, layout: Layout, group: Group, ranks: int) -> State:
    """Return the bytes of one parameter group, reduced over `ranks` ranks."""
    optimizer, item, zero = facts.optimizer, group.item, layout.zero
    sums, whole = optimizer.sum_item or item, group.elements
    early = facts.description.early
    if not zero or group.others:
        # Sums of another dtype are kept in addition to the gradients for the optimizer.
        gradients = whole * (item if sums == item else item + sums)
        gradients += whole * item * (group.others > 0 and sums == item and ranks > 1)
        states = whole * optimizer.moments * (optimizer.item or item)
        states += optimizer.per_tensor * group.tensors
        summed = layout.grid.cp * layout.grid.dp > 1 or ranks > 1
        stays = summed or bool(optimizer.sum_item) or not early
        comes = gradients * (not stays)
        return State(
            whole * item, gradients * stays, states, comes, second=comes,
            ties=whole * item * group.others,
        )  # fmt: skip
    own = -(-whole // ranks)
    master = item if zero == 3 else max(item, 4)
    states = own * optimizer.moments * (optimizer.item or master)
    states += own * master * (master != item)
    states += optimizer.per_tensor * (group.tensors if zero == 3 else -(-group.tensors // ranks))
    if zero == 3:
        layer, rest = group.layer * item, group.rest * item
        return State(
            own * item, own * item * (not early), states, own * item * early,
            start=rest + layer, inside=rest + GATHERED * layer,
        )  # fmt: skip
    bucket, pair = group.bucket * sums, group.in_a_row(OPEN) * sums
    coming = ending = 0
    if ranks > 1:  # the receive buffer is a shard, or a full bucket if this library sums
        shards = 1 if not optimizer.native or sums == 2 else ranks
        coming, ending = bucket // shards, pair // shards
    if zero == 1 and not early:  # other programs allocate shards from the start
        return State(whole * item, whole * sums + own * master, states)
    if zero == 1:
        return State(whole * item, whole * sums, states, last=own * master, inside=coming,
                     bucket=bucket, ending=ending, whole=whole * sums)  # fmt: skip
    # The first bucket has deferred weights, so that all wait for the end of a first half. A norm's
    # gradient opens the bucket of its neighbours, and is a view of its shard, which stays with it.
    alone = group.largest > group.usual  # in a bucket of its own, which ends the one before
    opened = whole - group.deferred * (group.most > group.usual)
    mine = own * master
    return State(
        whole * item, 0, states, mine, first=mine * opened // whole,
        second=mine * group.deferred // whole, again=mine, inside=pair + coming, bucket=bucket,
        whole=whole * sums, opened=opened * sums, late=(group.deferred if alone else whole) * sums,
        single=group.largest * item, shared=0 if alone else group.usual * sums // 2, ending=ending,
    )  # fmt: skip


class Chunk(NamedTuple):
    """Bytes of a pipeline chunk for a micro-batch."""

    kept: int  # activations that autograd keeps until backward
    left: int  # bytes that the first half of a split backward leaves for the second
    working: dict[str, int]  # most temporary bytes of a block above `kept`, by kind of action
    inside: int  # the same for the layers alone, in backward
    tail: int  # bytes that the first layer needs in backward, when nothing else is kept
    split: int  # the same in the first half of a split backward, with what later blocks left
    ahead: float  # share of the rank's parameters whose gradients are still missing by then


def memory(
    description: Description,
    layout: Layout,
    optimizer: Optimizer | None = None,
    *,
    facts: Facts | None = None,
) -> tuple[Memory, ...]:
    """Return the bytes of the fullest rank at each place of the pipeline.

    `zero` 3 is torch's `fully_shard`, one block at a time. `facts` has cached results.
    """
    known, found = facts or Facts(description, optimizer), list[Memory]()
    for rank, number in enumerate(known.pipeline(layout)[0]):
        own = state(known, layout, number)
        gradients, *rest = max(_peaks(known, layout, own, number, rank), key=sum)
        found.append(Memory(own.parameters, own.gradients + gradients, own.optimizer, *rest))
    return tuple(found)


def peak(facts: Facts, layout: Layout, room: float = inf) -> int:
    """Return the largest total of `memory`, or the first one found above `room`."""
    found = 0
    for number, rank in facts.pipeline(layout)[1]:
        own = state(facts, layout, number)
        still = own.parameters + own.gradients + own.optimizer
        for sizes in chain([()], _peaks(facts, layout, own, number, rank)):
            found = max(found, still + sum(sizes))
            if found > room:
                return found
    return found


def _peaks(
    facts: Facts, layout: Layout, own: State, number: int, rank: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield gradients, activations, working memory and buffers at each moment that may be the peak.

    Backward frees activations as gradients arrive: its peak is when it begins, when the first
    bucket is full, or when it ends. On 58 layouts of real ranks each changed some peak by 3 to 8 %.
    """
    chunks, handed = chunks_of(facts, layout, number)
    message = _messages(facts, layout, number, handed)
    kept, left = [chunk.kept for chunk in chunks], [chunk.left for chunk in chunks]
    # A bucket is sent when full; by then the same share of activations has been freed.
    share = own.bucket / own.whole if own.whole else 0.0
    # A recomputed layer fills a bucket while its activations are freed.
    filled = own.bucket if layout.recompute == "full" else 0
    count = len(chunks)
    for moment in alive(layout, rank):
        splits = own.opened or own.second
        if moment.kind == "W" and not splits:
            continue
        chunk, messages = chunks[moment.chunk], message(sum(moment.whole))
        activations = sum(map(mul, moment.whole, kept)) + sum(map(mul, moment.halves, left))
        brought = own.arrived(moment.begun) // count
        all_ = moment.begun[0] + moment.begun[2] == count  # chunks have their gradients
        yield brought, activations, chunk.working[moment.kind], messages + own.start
        if moment.kind in "IW" and splits:
            # All buckets are sent when it ends: the first one waits for the other half.
            first = moment.kind == "I"
            rest = activations + (chunk.left - chunk.kept if first else -chunk.left)
            opened = (own.opened if first else own.late) // count + own.shared * (count > 1)
            yield brought, rest, 0, messages + opened + own.ending
            coming = own.again if first or all_ else own.second
            yield brought + coming // count, rest, 0, messages + own.inside
            if first:
                come = round(opened * max(0.0, 1 - chunk.ahead * count)) + own.single
                yield brought, activations - chunk.kept, chunk.split, messages + come
            continue
        if own.last:  # the last backward: no other micro-batch is alive
            activations, come = chunk.kept, round(own.last * max(0.0, 1 - share - chunk.ahead))
        elif own.inside or own.brought:
            coming = own.again if all_ else own.brought
            ahead = chunk.ahead if own.whole else 0.0  # the running layer's come during its peak
            come = round(coming * max(0.0, 1 / count - share - ahead))
        else:
            continue
        for gone, working, gradients in (
            (share, chunk.inside, brought),
            (1.0, chunk.tail, brought + come),
        ):
            rest = max(0, activations - round(chunk.kept * gone) + min(0, working))
            opened = max(0, own.inside - min(filled, max(0, working)))
            yield gradients, rest, max(0, working), messages + opened
    # The last bucket is received while the shards of all earlier ones exist.
    end = own.arrived(begun(layout, rank)) // count
    before, coming = (end, own.again) if layout.micro_batches > 1 else (0, own.brought)
    if own.ending:
        yield before + round((coming + own.last) * (1 - share)), 0, 0, own.ending
    yield end + own.last, 0, 0, own.ties


def _messages(facts: Facts, layout: Layout, number: int, size: int) -> Callable[[int], int]:
    """Return a function of live micro-batches: the bytes of messages of `size` between stages."""
    content = facts.contents[number]
    ways = (content.sent > 0) + (content.received > 0)
    if not ways:
        return lambda _: 0
    chunks, early = len(content.chunks), facts.description.early
    all_ = layout.micro_batches * chunks

    def message(alive_: int) -> int:
        passed = round(alive_ * content.sent / chunks)  # a sent output stays until its backward
        if not early:
            return (passed + ways) * size
        done = all_ - alive_
        back = min(IN_FLIGHT // ways, done) if content.received else 0
        forward = max(0, min(IN_FLIGHT // ways, done + passed) - passed) if content.sent else 0
        return (passed + back + forward + 1) * size

    return message


@once_for(lambda _, layout, number: (layout.cut, layout.recompute, layout.micro_rows, number))
def chunks_of(facts: Facts, layout: Layout, number: int) -> tuple[list[Chunk], int]:
    """Return the memory needs of a rank's chunks for a micro-batch, and the bytes of a message."""
    found = [_chunk(facts, layout, runs) for runs in facts.contents[number].chunks]
    all_ = sum(group.elements for group in facts.groups(layout, number)) or 1
    return [own._replace(ahead=own.ahead / all_) for own in found], facts.handed(layout)


@once_for(lambda _, layout, runs: (layout.cut, layout.recompute, layout.micro_rows, runs))
def _chunk(facts: Facts, layout: Layout, runs: Runs) -> Chunk:
    """Return a chunk's bytes; blocks after the running one keep `left` and an output gradient."""
    rows = layout.micro_rows
    behaviours = facts.description.behaviours(layout.cut)
    shared = left = under = 0.0
    forwards: list[float] = []
    backwards: list[tuple[float, float, bool]] = []  # bytes, `left`, whether it is a layer
    gradients = [behaviours[kind].entered.at(rows) for kind, _ in runs[1:]] + [0.0]
    for (kind, times), gradient in zip(runs, gradients, strict=True):
        own, layer = behaviours[kind], kind in facts.layers
        entered, again, keeps = own.entered.at(rows), 0.0, own.kept.at(rows)
        if layer and layout.recompute == "full":
            keeps, again = entered, max(0.0, keeps - entered)
        shared = max(shared, own.shared.at(rows))
        leaves, needs = own.left.at(rows), own.backward_peak.at(rows) + again
        # In a run of equal blocks, `kept` is largest at the last one and `left` at the first.
        first = under + keeps + needs + (entered if times > 1 else gradient)
        under += keeps * times
        forwards.append(under + own.forward_peak.at(rows))
        backwards.append((first, left + leaves, layer))
        backwards.append((under + needs + gradient, left + leaves * times, layer))
        left += leaves * times
    plain = [needs for needs, _, _ in backwards]
    halved = [needs + left - here for needs, here, _ in backwards]
    layers = [at for at, (_, _, layer) in enumerate(backwards) if layer] or [*range(len(plain))]
    most = {"F": max(forwards), "B": max(plain), "I": max(halved), "W": under}
    most["FB"] = max(most["F"], most["B"])
    working = {kind: max(0, round(needs - under)) for kind, needs in most.items()}
    first = next((at for at, (kind, _) in enumerate(runs) if kind in facts.layers), 0)
    early = [*runs[:first], (runs[first][0], 1)]
    ahead = sum(each.local * n for kind, n in early for each in behaviours[kind].parameters)
    return Chunk(
        round(under + shared), round(left), working, round(max(plain[at] for at in layers) - under),
        round(plain[layers[0]]), round(halved[layers[0]]), ahead,
    )  # fmt: skip
