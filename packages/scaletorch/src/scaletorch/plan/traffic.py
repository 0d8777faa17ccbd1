"""Collectives of a step on the ranks of a layout: how many, and the bytes that a rank sends.

Bytes are those of rings, whatever a backend does: an all-reduce of n ranks sends 2 (n - 1) / n of
its tensor, a reduce-scatter and an all-gather (n - 1) / n of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from .description import Behaviour
from .estimate import Traffic
from .held import Known
from .layout import Layout
from .stages import backwards

WORD = 4  # bytes of a flag
LOSS = 8  # bytes of the loss, while it is summed
FLAGS = 6  # words besides those of parameters: whether ranks are at the same place of the step
COUNTS = 72  # bytes: tokens of the step, whether a rank refuses, and a sample of parameters
AGREED = 24  # bytes of a rank: a digest of the step's schedule and shapes
ENDED = 2  # bytes of a rank: whether the step has failed there, and its loss is of float64
SILENT = ("receive", "barrier")  # send nothing
_HEAD_NORM = re.compile("(q|k|query|key)_?(layer)?norm")


def ranks_send(known: Known, layout: Layout) -> tuple[tuple[Traffic, ...], ...]:
    """Return what a rank at each place of the pipeline sends in a step, and its update.

    A step is `train_step` after the first one, and `optimizer.step()`. Not in it: clipping by the
    norm, which is an all-reduce of 8 bytes over each axis.

    Raises:
        InvalidArgumentError: The model cannot be cut so, or has fewer layers than stages.
    """
    rounds = [1.0] * layout.grid.pp
    if layout.zero >= 2:  # each backward sums the gradients of its chunk
        rounds = [*backwards(layout.schedule, layout.grid.pp, layout.micro_batches, layout.chunks)]
    found: dict[tuple[int, float], tuple[Traffic, ...]] = {}
    for own in zip(known.numbers(layout), rounds, strict=True):
        if own not in found:
            found[own] = tuple(_calls(known, layout, *own))
    return tuple(found[own] for own in zip(known.numbers(layout), rounds, strict=True))


def _calls(known: Known, layout: Layout, number: int, rounds: float) -> Iterator[Traffic]:
    """Yield the collectives of a step, those of one sort and purpose together."""
    yield from _joined(_blocks(known, layout, number))
    yield from _sends(known, layout, number)
    yield from _partial(known, layout, number)
    yield from _joined(_ends(known, layout, number, rounds))


def _joined(sent: Iterable[Traffic]) -> Iterator[Traffic]:
    """Add up what goes over the same axis by the same operation."""
    total: dict[tuple[str, str], Traffic] = {}
    for each in sent:
        key = each.axis, each.operation
        own = total.get(key) or Traffic(*key, 0, 0)
        total[key] = Traffic(*key, own.count + each.count, own.bytes + each.bytes)
    yield from total.values()


def _blocks(known: Known, layout: Layout, number: int) -> Iterator[Traffic]:
    """Yield what the blocks send themselves."""
    behaviours = known.description.behaviours(layout.cut)
    for kind, blocks in known.content(number).kinds.items():
        again = layout.recompute == "full" and kind in known.layers
        times = blocks * layout.micro_batches
        for each in _of_block(behaviours[kind], layout.micro_rows, again=again):
            yield Traffic(each.axis, each.operation, each.count * times, each.bytes * times)


def _of_block(behaviour: Behaviour, rows: int, *, again: bool) -> Iterator[Traffic]:
    """Yield what a block sends for a micro-batch."""
    for each in behaviour.sent:
        if each.operation not in SILENT:
            times = 2 if again and each.again and each.phase == "forward" else 1
            size = round(each.bytes.at(rows)) * times
            yield Traffic(each.axis, each.operation, each.count * times, size)


def _sends(known: Known, layout: Layout, number: int) -> Iterator[Traffic]:
    """Yield messages between stages, and tied gradients with a flag whether there is one."""
    if layout.grid.pp == 1:
        return
    content = known.content(number)
    count = layout.micro_batches * (content.sent + content.received)
    size = count * known.handed(layout)
    for group in known.groups(layout, number):
        count += 2 * group.others * group.tensors
        size += (group.elements * group.item + group.tensors) * group.others
    yield Traffic("pp", "send", count, size)


def _partial(known: Known, layout: Layout, number: int) -> Iterator[Traffic]:
    """Yield the sum of gradients that tp ranks have terms of: of norms of heads, or of shares."""
    sizes: dict[int, int] = {}
    behaviours = known.description.behaviours(layout.cut)
    for kind, blocks in known.content(number).kinds.items():
        for each in behaviours[kind].parameters:
            whole = {*each.local} == {each.elements} and not each.expert
            if whole and (layout.sequence_parallel or _HEAD_NORM.search(each.name)):
                item = max(each.item, WORD)
                sizes[item] = sizes.get(item, 0) + (each.elements + 1) * item * blocks
    for size in sizes.values():
        yield from _reduced("tp", layout.grid.tp, size)


def _ends(known: Known, layout: Layout, number: int, rounds: float) -> Iterator[Traffic]:
    """Yield what the end of a step sends: gradients are summed, ranks agree."""
    grid = layout.grid
    for own in (AGREED, ENDED) if grid.pp > 1 else ():
        yield Traffic("pp", "all_gather", 1, own * (grid.pp - 1))
    yield from _gradients(known, layout, number, rounds)
    yield from _reduced("cp_dp", grid.cp * grid.dp, LOSS)
    yield from _reduced("pp", grid.pp, LOSS)
    yield from _reduced("world", grid.world_size, COUNTS)


def _gradients(known: Known, layout: Layout, number: int, rounds: float) -> Iterator[Traffic]:
    """Yield the sums of gradients, and with ZeRO the fetching of updated parameters."""
    optimizer, grid = known.optimizer, layout.grid
    flags: dict[str, int] = {}
    for group in known.groups(layout, number):
        ranks = grid.edp if group.axis == "edp" else grid.cp * grid.dp
        if ranks == 1:
            continue
        flags[group.axis] = flags.get(group.axis, FLAGS) + group.tensors
        whole = group.elements * (optimizer.sum_item or group.item)
        calls = group.buckets(optimizer.bucket_size)
        if not layout.zero or group.others:
            times = rounds if group.others else 1  # of tied weights whole, in each round
            yield from _reduced(group.axis, ranks, round(whole * times), round(calls * times))
            continue
        gathered, fetches = group.elements * group.item, calls
        if layout.zero == 3:  # a layer is fetched for its forward and again for its backward
            layers = sum(n for k, n in known.content(number).kinds.items() if k in known.layers)
            calls = layers + (group.rest > 0)
            fetches = (2 * layers + (group.rest > 0)) * layout.micro_batches
            gathered = (2 * group.elements - group.rest) * group.item * layout.micro_batches
        if layout.zero == 2:  # a bucket with gradients of two chunks is summed for each
            item = optimizer.sum_item or group.item
            whole += (layout.chunks - 1) * group.bucket(optimizer.bucket_size) * item
        own = round(whole * (ranks - 1) // ranks * rounds)
        yield Traffic(group.axis, "reduce_scatter", round(calls * rounds), own)
        yield Traffic(group.axis, "all_gather", fetches, gathered * (ranks - 1) // ranks)
    for axis, words in flags.items() if layout.zero < 3 else ():
        ranks = grid.edp if axis == "edp" else grid.cp * grid.dp
        # With ZeRO 2 each chunk has a round of its own.
        times = round(rounds * (layout.chunks if layout.zero == 2 else 1))
        yield from _reduced(axis, ranks, words * WORD * times, times)


def _reduced(axis: str, ranks: int, size: int, calls: int = 1) -> Iterator[Traffic]:
    """Yield sums of so many bytes in all."""
    if ranks > 1:
        yield Traffic(axis, "all_reduce", calls, 2 * size * (ranks - 1) // ranks)
