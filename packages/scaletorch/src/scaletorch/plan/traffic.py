"""Collectives of a step on the ranks of a layout: how many, and the bytes that a rank sends.

Bytes are those of rings, whatever a backend does: an all-reduce of n ranks sends 2 (n - 1) / n of
its tensor, a reduce-scatter and an all-gather (n - 1) / n of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from .description import Behaviour
from .estimate import Traffic
from .holding import Holdings
from .holding.buckets import Buckets, Optimizer
from .holding.live import backwards
from .layout import Layout

Sums = tuple[int, ...]  # how many backwards of each chunk sum it; () if the last alone sums all
WORD = 4  # bytes of a flag
LOSS = 8  # bytes of the loss, while it is summed
FLAGS = 6  # words besides those of parameters: whether ranks are at the same place of the step
COUNTS = 72  # bytes: tokens of the step, whether a rank refuses, and a sample of parameters
AGREED = 24  # bytes of a rank: a digest of the step's schedule and shapes
_HEAD_NORM = re.compile("(q|k|query|key)_?(layer)?norm")
SILENT = ("receive", "barrier")  # send nothing
ENDED = 2  # bytes of a rank: whether the step has failed there, and its loss is of float64


def ranks_send(known: Holdings, layout: Layout) -> tuple[tuple[Traffic, ...], ...]:
    """Return what a rank at each place of the pipeline sends in a step, and its update.

    A step is `train_step` after the first one, and `optimizer.step()`. Not in it: clipping by the
    norm, which is an all-reduce of 8 bytes over each axis. On one host ranks may read each other's
    memory in place of the messages for gradients.

    Raises:
        InvalidArgumentError: The model cannot be cut so, or has fewer layers than stages.
    """
    full = layout.recompute == "full"
    key = layout.grid, layout.cut, layout.zero, full, layout.micro_rows, layout.micro_batches
    found: dict[tuple[int, Sums], tuple[Traffic, ...]] = known.sent.setdefault(key, {})
    each = list(zip(known.numbers(layout), synchronised(layout), strict=True))
    for rank, own in enumerate(each):
        if own not in found:
            found[own] = tuple(calls(known, layout, rank, sums=own[1]))
    return tuple(found[own] for own in each)


def synchronised(layout: Layout) -> tuple[Sums, ...]:
    """Return for each rank of the pipeline which of its backwards sum gradients over ranks.

    From ZeRO 2 on each does, into shards, of its chunk; else the last one alone, of all.
    """
    if layout.zero < 2:
        return ((),) * layout.grid.pp
    return backwards(layout.schedule, layout.grid.pp, layout.micro_batches, layout.chunks)


def joined(sent: Iterable[Traffic]) -> Iterator[Traffic]:
    """Add up what goes over the same axis by the same operation."""
    total: dict[tuple[str, str], Traffic] = {}
    for each in sent:
        key = each.axis, each.operation
        if (own := total.get(key)) is not None:
            each = Traffic(*key, own.count + each.count, own.bytes + each.bytes)
        total[key] = each
    yield from total.values()


def calls(
    known: Holdings, layout: Layout, rank: int, tp: int | None = None, sums: Sums | None = None
) -> Iterator[Traffic]:
    """Yield the collectives of a step, those of one sort and purpose together.

    Args:
        known: Of the description.
        layout: The layout.
        rank: Of the pipeline.
        tp: The tp rank, and the ep rank of experts; None is the one that has the most parameters.
        sums: Of `synchronised`, if it is known.
    """
    number = known.numbers(layout)[rank]
    yield from _blocks(known, layout, number)
    yield from _sends(known, layout, number, tp)
    yield from _partial(known, layout, number)
    yield from _ends(
        known, layout, number, tp, synchronised(layout)[rank] if sums is None else sums
    )


def _ends(
    known: Holdings, layout: Layout, number: int, tp: int | None, sums: Sums
) -> Iterable[Traffic]:
    """Return what the end of a step sends: gradients are summed, ranks agree."""
    grid = layout.grid
    fetched = layout.micro_batches if layout.zero == 3 else 0
    key = (
        grid.tp, grid.ep, grid.etp, grid.cp * grid.dp, grid.pp, number, tp, layout.zero, sums,
        fetched,
    )  # fmt: skip
    found: list[Traffic] | None = known.ends.get(key)
    if found is None:
        found = known.ends[key] = list(joined(_of_end(known, layout, number, tp, sums)))
    return found


def _of_end(
    known: Holdings, layout: Layout, number: int, tp: int | None, sums: Sums
) -> Iterator[Traffic]:
    grid = layout.grid
    for own in (AGREED, ENDED) if grid.pp > 1 else ():
        yield Traffic("pp", "all_gather", 1, own * (grid.pp - 1))
    for axis, buckets in known.buckets(layout, number, tp).items():
        ranks = grid.edp if axis == "edp" else grid.cp * grid.dp
        if ranks > 1:
            yield from _summed(known, axis, buckets, layout, ranks, sums)
    yield from _reduced("cp_dp", grid.cp * grid.dp, LOSS)
    yield from _reduced("pp", grid.pp, LOSS)
    yield from _reduced("world", grid.world_size, COUNTS)


def _partial(known: Holdings, layout: Layout, number: int) -> Iterator[Traffic]:
    """Yield the sum of gradients that tp ranks have terms of: of norms of heads, or of shares."""
    sizes: dict[int, int] = {}
    behaviours = known.description.behaviours(layout.cut)
    for kind, blocks in known.kinds(number).items():
        for each in behaviours[kind].parameters:
            whole = {*each.local} == {each.elements} and not each.expert
            if whole and (layout.sequence_parallel or _HEAD_NORM.search(each.name)):
                item = max(each.item, WORD)
                sizes[item] = sizes.get(item, 0) + (each.elements + 1) * item * blocks
    for size in sizes.values():
        yield from _reduced("tp", layout.grid.tp, size)


def _blocks(known: Holdings, layout: Layout, number: int) -> Iterator[Traffic]:
    """Yield what the blocks send themselves."""
    full = layout.recompute == "full"
    key = layout.cut, full, layout.micro_rows
    found: list[list[Traffic]] | None = known.sends.get(key)
    if found is None:
        behaviours = enumerate(known.description.behaviours(layout.cut))
        found = known.sends[key] = [
            list(joined(_of_block(own, full and kind in known.layers, layout.micro_rows)))
            for kind, own in behaviours
        ]
    total: dict[tuple[str, str], list[int]] = {}
    for kind, blocks in known.kinds(number).items():
        times = blocks * layout.micro_batches
        for each in found[kind]:
            own = total.setdefault((each.axis, each.operation), [0, 0])
            own[0] += each.count * times
            own[1] += each.bytes * times
    for (axis, operation), (count, size) in total.items():
        yield Traffic(axis, operation, count, size)


def _of_block(behaviour: Behaviour, again: bool, rows: int) -> Iterator[Traffic]:
    """Yield what a block sends for a micro-batch."""
    for each in behaviour.sent:
        if each.operation not in SILENT:
            times = 2 if again and each.again and each.phase == "forward" else 1
            size = round(each.bytes.at(rows)) * times
            yield Traffic(each.axis, each.operation, each.count * times, size)


def _sends(known: Holdings, layout: Layout, number: int, tp: int | None) -> Iterator[Traffic]:
    """Yield messages between stages, as `derive_messages` has them, and tied gradients."""
    if layout.grid.pp == 1:
        return
    behaviours = known.description.behaviours(layout.cut)
    content = known.content(number)
    handed = [*content.sent, *content.returned]
    count = layout.micro_batches * len(handed)
    size = sum(round(behaviours[kind].handed.at(layout.micro_rows)) for kind in handed)
    size *= layout.micro_batches
    tied = any(others for _, others in content.ties)
    for each in known.parameters(layout, number, tp) if tied else ():
        # And a byte: whether there is a gradient.
        count += 2 * each.others
        size += (each.elements * each.item + 1) * each.others
    yield Traffic("pp", "send", count, size)


def _summed(
    known: Holdings, axis: str, buckets: Buckets, layout: Layout, ranks: int, sums: Sums
) -> list[Traffic]:
    """Return the sums of gradients, and with ZeRO the fetching of updated parameters."""
    fetched = layout.micro_batches if layout.zero == 3 else 0
    key = buckets, axis, ranks, sums, fetched
    found: list[Traffic] | None = known.sums.get(key)
    if found is None:
        found = known.sums[key] = list(
            joined(_gradients(axis, buckets, ranks, sums, fetched, known.optimizer))
        )
    return found


def _gradients(
    axis: str, buckets: Buckets, ranks: int, sums: Sums, fetched: int, optimizer: Optimizer
) -> Iterator[Traffic]:
    flags, rounds = FLAGS, sum(sums) if sums else 1
    for bucket, alike in buckets.each:
        item = optimizer.sum_item or bucket.item
        whole = bucket.padded(ranks) * item
        calls = alike * (bucket.sums(sums) if sums else 1)
        if bucket.sharded:
            own = whole * (ranks - 1) // ranks
            yield Traffic(axis, "reduce_scatter", calls, own * calls)
            gathered = bucket.padded(ranks) * bucket.item * (ranks - 1) // ranks
            times = alike * (fetched or 1) * (2 if bucket.gathered == "layer" else 1)
            yield Traffic(axis, "all_gather", times, gathered * times)
        else:
            yield from _reduced(axis, ranks, whole, calls)
        flags += len(bucket.sizes) * alike
    if not fetched:
        yield from _reduced(axis, ranks, flags * WORD, rounds)


def _reduced(axis: str, ranks: int, size: int, times: int = 1) -> Iterator[Traffic]:
    if ranks > 1:
        yield Traffic(axis, "all_reduce", times, 2 * size * (ranks - 1) // ranks * times)
