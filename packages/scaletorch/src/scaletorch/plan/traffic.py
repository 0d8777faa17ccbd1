"""Collectives of a step on the ranks of a layout: how many, and the bytes that a rank sends.

Bytes are those of rings, whatever a backend does: an all-reduce of n ranks sends 2 (n - 1) / n of
its tensor, a reduce-scatter and an all-gather (n - 1) / n of the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from .description import Description
from .estimate import Traffic
from .holding import Holdings
from .holding.buckets import Bucket, Optimizer
from .holding.live import backwards
from .layout import Layout

WORD = 4  # bytes of a flag
FLAGS = 4  # words besides those of parameters: whether ranks are at the same place of the step
COUNTS = 32  # bytes: tokens of the step, and whether a rank has to refuse something
AGREED = 24  # bytes of a rank: a digest of the step's schedule and shapes
SILENT = ("receive", "barrier")  # send nothing
ENDED = 1  # byte of a rank: whether the step has failed there


def traffic(
    description: Description,
    layout: Layout,
    optimizer: Optimizer | None = None,
    *,
    holdings: Holdings | None = None,
) -> tuple[tuple[Traffic, ...], ...]:
    """Return what a rank at each place of the pipeline sends in a step, and its update.

    A step is `train_step` after the first one, and `optimizer.step()`. Not in it: clipping by the
    norm, which is an all-reduce of 8 bytes over each axis. On one host ranks may read each other's
    memory in place of the messages for gradients.

    Args:
        description: The model.
        layout: The layout.
        optimizer: In what gradients are summed.
        holdings: Of the same description and optimizer, to work out nothing twice.

    Raises:
        InvalidArgumentError: The model cannot be cut so, or has fewer layers than stages.
    """
    known = holdings or Holdings(description, optimizer)
    sums = synchronised(layout)
    found: dict[tuple[int, int], tuple[Traffic, ...]] = {}
    each = list(zip(known.numbers(layout), sums, strict=True))
    for rank, key in enumerate(each):
        if key not in found:
            found[key] = tuple(joined(calls(known, layout, rank, sums=key[1])))
    return tuple(found[key] for key in each)


def synchronised(layout: Layout) -> tuple[int, ...]:
    """Return for each rank of the pipeline how many of its backwards sum gradients over ranks.

    From ZeRO 2 on each does, into shards; else the last one alone.
    """
    if layout.zero < 2:
        return (1,) * layout.grid.pp
    return backwards(layout.schedule, layout.grid.pp, layout.micro_batches, layout.chunks)


def joined(sent: Iterable[Traffic]) -> Iterator[Traffic]:
    """Add up what goes over the same axis by the same operation."""
    total: dict[tuple[str, str], tuple[int, int]] = {}
    for each in sent:
        count, size = total.get((each.axis, each.operation), (0, 0))
        total[each.axis, each.operation] = count + each.count, size + each.bytes
    for (axis, operation), (count, size) in total.items():
        yield Traffic(axis, operation, count, size)


def calls(
    known: Holdings, layout: Layout, rank: int, tp: int | None = None, sums: int | None = None
) -> Iterator[Traffic]:
    """Yield the collectives of a step, those of one sort and purpose together.

    Args:
        known: Of the description.
        layout: The layout.
        rank: Of the pipeline.
        tp: The tp rank, and the ep rank of experts; None is the one that has the most parameters.
        sums: Of `synchronised`, if it is known.
    """
    grid, number = layout.grid, known.numbers(layout)[rank]
    sums = synchronised(layout)[rank] if sums is None else sums
    yield from _blocks(known, layout, number)
    yield from _pipeline(known, layout, number, tp)
    yield from _sums(known, layout, number, tp, sums)
    item = max(_item(known, layout), WORD)
    yield from _reduced("cp_dp", grid.cp * grid.dp, item)  # the loss
    yield from _reduced("pp", grid.pp, item)
    yield from _reduced("world", grid.world_size, COUNTS)


def _sums(
    known: Holdings, layout: Layout, number: int, tp: int | None, sums: int
) -> Iterator[Traffic]:
    """Yield the sums of gradients on ranks of this number, by axis and operation."""
    grid = layout.grid
    fetched = layout.micro_batches if layout.zero == 3 else 0
    key = (
        grid.tp, grid.ep, grid.etp, grid.cp * grid.dp, grid.edp, number, tp, layout.zero, sums,
        fetched,
    )  # fmt: skip
    found: list[Traffic] | None = known.sums.get(key)
    if found is None:
        found = known.sums[key] = []
        for axis, buckets in known.buckets(layout, number, tp).items():
            ranks = grid.edp if axis == "edp" else grid.cp * grid.dp
            if ranks > 1:
                found += joined(_gradients(axis, buckets, layout, ranks, sums, known.optimizer))
    yield from found


def _blocks(known: Holdings, layout: Layout, number: int) -> Iterator[Traffic]:
    """Yield what the blocks send themselves."""
    key = layout.cut, number, layout.recompute == "full", layout.micro_rows, layout.micro_batches
    found: list[Traffic] | None = known.sends.get(key)
    if found is None:
        found = known.sends[key] = list(joined(_of_blocks(known, layout, number)))
    yield from found


def _of_blocks(known: Holdings, layout: Layout, number: int) -> Iterator[Traffic]:
    behaviours = known.description.behaviours(layout.cut)
    kinds = Counter[int]()
    for kind, times in (each for chunk in known.runs(number) for each in chunk):
        kinds[kind] += times
    for kind, blocks in kinds.items():
        again = layout.recompute == "full" and kind in known.layers
        for each in behaviours[kind].sent:
            if each.operation in SILENT:
                continue
            twice = again and each.again and each.phase == "forward"
            times = blocks * layout.micro_batches * (2 if twice else 1)
            size = round(each.bytes.at(layout.micro_rows)) * times
            yield Traffic(each.axis, each.operation, each.count * times, size)


def _pipeline(known: Holdings, layout: Layout, number: int, tp: int | None) -> Iterator[Traffic]:
    """Yield messages between stages, as `derive_messages` has them, and tied gradients."""
    if layout.grid.pp == 1:
        return
    behaviours = known.description.behaviours(layout.cut)
    content = known.content(number)
    for kind in (*content.sent, *content.returned):
        size = round(behaviours[kind].handed.at(layout.micro_rows))
        yield Traffic("pp", "send", layout.micro_batches, size * layout.micro_batches)
    tied = any(others for _, others in content.ties)
    for each in known.parameters(layout, number, tp) if tied else ():
        if each.others:  # and a byte: whether there is a gradient
            yield Traffic(
                "pp", "send", 2 * each.others, (each.elements * each.item + 1) * each.others
            )
    for own in (AGREED, ENDED):
        yield Traffic("pp", "all_gather", 1, own * (layout.grid.pp - 1))


def _gradients(
    axis: str,
    buckets: Sequence[tuple[Bucket, int]],
    layout: Layout,
    ranks: int,
    sums: int,
    optimizer: Optimizer,
) -> Iterator[Traffic]:
    """Yield the sums of gradients, and with ZeRO the fetching of updated parameters."""
    for bucket, alike in buckets:
        item = optimizer.sum_item or bucket.item
        whole = bucket.padded(ranks) * item
        if bucket.sharded:
            own, calls = whole * (ranks - 1) // ranks, sums * alike
            yield Traffic(axis, "reduce_scatter", calls, own * calls)
            fetched = bucket.padded(ranks) * bucket.item * (ranks - 1) // ranks
            times = alike
            if layout.zero == 3:
                times *= layout.micro_batches * (2 if bucket.gathered == "layer" else 1)
            yield Traffic(axis, "all_gather", times, fetched * times)
        else:
            yield from _reduced(axis, ranks, whole, sums * alike)
    if layout.zero < 3:
        flags = sum(len(bucket.sizes) * alike for bucket, alike in buckets) + FLAGS
        yield from _reduced(axis, ranks, flags * WORD, sums)


def _reduced(axis: str, ranks: int, size: int, times: int = 1) -> Iterator[Traffic]:
    if ranks > 1:
        yield Traffic(axis, "all_reduce", times, 2 * size * (ranks - 1) // ranks * times)


def _item(known: Holdings, layout: Layout) -> int:
    held = (p.item for kind in known.description.behaviours(layout.cut) for p in kind.parameters)
    return next(held, WORD)
