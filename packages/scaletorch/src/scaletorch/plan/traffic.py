"""Collectives of a step on the ranks of a layout: how many, and the bytes that a rank sends.

Bytes are those of rings, whatever a backend does: an all-reduce of n ranks sends 2 (n - 1) / n of
its tensor, a reduce-scatter and an all-gather (n - 1) / n of the whole. Flags and counts by which
ranks agree, a few bytes each, are not in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .estimate import Traffic
from .held import Known
from .layout import Layout
from .stages import backwards

WORD = 4  # least bytes of an element of gradients that tp ranks sum
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
    each = [*zip(known.numbers(layout), rounds, strict=True)]
    for own in {*each}:
        total: dict[tuple[str, str], Traffic] = {}
        for sent in _calls(known, layout, *own):
            key = sent.axis, sent.operation
            so_far = total.get(key) or Traffic(*key, 0, 0)
            count, size = so_far.count + sent.count, so_far.bytes + sent.bytes
            total[key] = Traffic(*key, count, size)
        found[own] = tuple(total.values())
    return tuple(found[own] for own in each)


def _calls(known: Known, layout: Layout, number: int, rounds: float) -> Iterator[Traffic]:
    """Yield the collectives of a step."""
    yield from _blocks(known, layout, number)
    yield from _sends(known, layout, number)
    yield from _partial(known, layout, number)
    yield from _gradients(known, layout, number, rounds)


def _blocks(known: Known, layout: Layout, number: int) -> Iterator[Traffic]:
    """Yield the collectives inside of blocks."""
    behaviours = known.description.behaviours(layout.cut)
    for kind, blocks in known.content(number).kinds.items():
        again = layout.recompute == "full" and kind in known.layers
        for each in behaviours[kind].sent:
            if each.operation not in SILENT:
                times = blocks * layout.micro_batches
                times *= 2 if again and each.again and each.phase == "forward" else 1
                size = round(each.bytes.at(layout.micro_rows))
                yield Traffic(each.axis, each.operation, each.count * times, size * times)


def _sends(known: Known, layout: Layout, number: int) -> Iterator[Traffic]:
    """Yield messages between stages, and gradients of tied weights."""
    if layout.grid.pp == 1:
        return
    content = known.content(number)
    count = layout.micro_batches * (content.sent + content.received)
    size = count * known.handed(layout)
    for group in known.groups(layout, number):
        count += group.others * group.tensors
        size += group.elements * group.item * group.others
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
                sizes[item] = sizes.get(item, 0) + each.elements * item * blocks
    for size in sizes.values():
        yield from _reduced("tp", layout.grid.tp, size)


def _gradients(known: Known, layout: Layout, number: int, rounds: float) -> Iterator[Traffic]:
    """Yield the sums of gradients, and with ZeRO the fetching of updated parameters."""
    optimizer, grid = known.optimizer, layout.grid
    for group in known.groups(layout, number):
        ranks = grid.edp if group.axis == "edp" else grid.cp * grid.dp
        if ranks == 1:
            continue
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


def _reduced(axis: str, ranks: int, size: int, calls: int = 1) -> Iterator[Traffic]:
    """Yield sums of so many bytes in all."""
    if ranks > 1:
        yield Traffic(axis, "all_reduce", calls, 2 * size * (ranks - 1) // ranks)
