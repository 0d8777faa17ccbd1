"""Flat buffers of which each rank owns a part: reduced to all or the owners, and gathered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import InvalidArgumentError
from ..transport.flat_buffers import FlatBuffers
from ..transport.node_memory import NodeMemory
from ..transport.ways import way_of
from ..wire.backend import bring_home, on_wire, process_group
from ..wire.checks import checking, compare, tells_failure
from ..wire.recipes import Recipe, recipe_for
from ..wire.sums import even_parts, fold, parts_of, sum_dtype
from ..wire.work import Work, given, nothing, settled
from .reduce import unpack_into

SCALED = {"sum": False, "mean": True}


@tells_failure
def all_reduce_flat(
    data: Tensor, op: str = "sum", group: ProcessGroup | None = None, *, ordered: bool = False,
    start: Tensor | None = None, buffers: FlatBuffers | None = None,
) -> Work[Tensor]:  # fmt: skip
    """Sum a flat buffer over the ranks, in place and asynchronously.

    16-bit floats are summed in float32 and rounded once on every backend, where NCCL's and Gloo's
    all-reduce round at each rank. As many bytes travel; half of them after `wait()` is called.

    Args:
        data: Flat contiguous tensor, floating-point or complex.
        op: `"sum"` or `"mean"`.
        group: The default group by default.
        ordered: Add in rank order on every backend, so that the bits depend on no partition.
        start: What the sum begins with (after division for `"mean"`), as long as `data`; only with
            `ordered`.
        buffers: Of which `data` is, if of any.

    Returns:
        The work; its `wait()` gives `data`.

    Raises:
        InvalidArgumentError: No flat tensor, or an unknown op.
    """
    if data.ndim != 1:
        raise InvalidArgumentError(f"all_reduce_flat takes a flat tensor, got {tuple(data.shape)}")
    mean, members = _is_mean(op), process_group(group)
    size = 1 if members is None else members.size()
    wire = data if members is None else on_wire(data, members)
    way = None if members is None else way_of(wire, members, True, buffers)
    folded = ordered or (size > 1 and data.numel() > 0 and _is_narrow(wire))
    if folded or isinstance(way, NodeMemory):
        counts = even_parts(data.numel(), size)
        own = parts_of(counts)[0 if members is None else members.rank()]
        first = None if start is None else start[own.start : own.stop]
        if members is None or not isinstance(way, NodeMemory):
            shard = reduce_scatter_flat(data, counts, op, group, ordered=ordered, start=first)
            return Work((shard,), partial(_put_together, data, counts, own, group, shard))
        if checking():
            compare(members, "all_reduce_flat", data, op)
        return way.all_reduce(data, counts, mean=mean, start=first)
    if members is not None and checking():
        compare(members, "all_reduce_flat", data, op)
    if way is None or size == 1 or not data.numel():
        return Work((), partial(given, data))
    recipe = recipe_for(op, wire.dtype)
    packed = wire if recipe.plain else recipe.pack(wire)
    done = partial(_unpacked_into, data, recipe, size)
    return cast(Work[Tensor], way.all_reduce(packed, recipe, done, True))


@tells_failure
def reduce_scatter_flat(
    data: Tensor, counts: Sequence[int], op: str = "sum", group: ProcessGroup | None = None, *,
    ordered: bool = False, start: Tensor | None = None, buffers: FlatBuffers | None = None,
) -> Work[Tensor]:  # fmt: skip
    """Sum each rank's part of a flat buffer over the ranks, asynchronously.

    16-bit floats are summed in float32 on every backend.

    Args:
        data: Flat floating-point or complex tensor; read until the work is waited for.
        counts: Elements of each rank's part; the parts lie in rank order.
        op: As in `all_reduce_flat`.
        group: As there.
        ordered: As there.
        start: As there, but this rank's part.
        buffers: As there.

    Returns:
        The work; its `wait()` gives this rank's part of the sum, new memory, 16-bit floats as
        float32.

    Raises:
        InvalidArgumentError: The parts are not the buffer's, or an unknown op.
    """
    members = process_group(group)
    size, rank = (1, 0) if members is None else (members.size(), members.rank())
    _check(data, counts, size, "reduce_scatter_flat")
    mean = _is_mean(op)
    divisor = size if mean else 1
    if members is None or size == 1:
        return Work((), partial(_summed, data.device, start, divisor, 1, False, data.detach()))
    if checking():
        compare(members, "reduce_scatter_flat", data, list(counts), op, f"ordered={ordered}")
    wire = on_wire(data, members)
    way = way_of(wire, members, True, buffers)
    if isinstance(way, NodeMemory):
        return way.reduce_scatter(wire, counts, mean=mean, start=start)
    if not ordered:
        done = partial(_summed, data.device, start, divisor, 1, True)
        recipe = recipe_for("sum", wire.dtype)
        call = way.fold_scatter if _is_narrow(wire) else way.reduce_scatter
        return cast(Work[Tensor], call(wire, counts, recipe, done, True))
    done = partial(_summed, data.device, start, divisor, size, False)
    return cast(Work[Tensor], way.exchange(wire, counts, [counts[rank]] * size, done, True))


@tells_failure
def all_gather_flat(
    data: Tensor,
    counts: Sequence[int],
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    buffers: FlatBuffers | None = None,
) -> Work[None] | None:
    """Fill a flat buffer, of which every rank has its own part, with the parts of all, in place.

    Args:
        data: Flat contiguous tensor of any dtype.
        counts: Elements of each rank's part; the parts lie in rank order.
        group: The default group by default.
        async_op: Return a Work at once; `data` is whole after its `wait()`.
        buffers: Of which `data` is, if of any.

    Raises:
        InvalidArgumentError: The parts are not the buffer's.
    """
    members = process_group(group)
    size = 1 if members is None else members.size()
    _check(data, counts, size, "all_gather_flat")
    if members is None or size == 1 or not data.numel():
        return settled((), nothing, async_op)
    if checking():
        compare(members, "all_gather_flat", data, list(counts))
    wire = on_wire(data, members)
    way = way_of(wire, members, async_op, buffers)
    if isinstance(way, NodeMemory):
        work = Work((way.all_gather(wire, counts),), nothing)
        return work if async_op else work.wait()
    return way.gather_flat(wire, counts, partial(bring_home, data), async_op)


def _check(data: Tensor, counts: Sequence[int], size: int, call: str) -> None:
    if data.ndim != 1 or len(counts) != size or sum(counts) != data.numel():
        raise InvalidArgumentError(
            f"{call} takes a flat tensor and its elements for each of {size} ranks, got shape "
            f"{tuple(data.shape)} and {list(counts)}"
        )


def _is_narrow(data: Tensor) -> bool:
    """Return whether a backend may round a sum of such numbers at each rank."""
    return sum_dtype(data.dtype) is not data.dtype


def _is_mean(op: str) -> bool:
    if op not in SCALED:
        raise InvalidArgumentError(f"op must be one of {', '.join(map(repr, SCALED))}, got {op!r}")
    return SCALED[op]


def _summed(
    device: torch.device,
    start: Tensor | None,
    divisor: int,
    blocks: int,
    spoil: bool,
    data: Tensor,
) -> Tensor:
    """Add blocks of equal length, one after another in memory, behind `start`; as `fold` does."""
    rows = data.view(blocks, data.numel() // blocks)
    return fold(rows, start=start, divisor=divisor, spoil=spoil).to(device)


def _put_together(
    data: Tensor, counts: Sequence[int], own: range, group: ProcessGroup | None, shard: Work[Tensor]
) -> Tensor:
    """Write this rank's part of a sum into the buffer, and fetch the others."""
    data[own.start : own.stop].copy_(shard.wait())
    all_gather_flat(data, counts, group)
    return data


def _unpacked_into(data: Tensor, recipe: Recipe, size: int, reduced: Tensor) -> Tensor:
    unpack_into(data.detach(), recipe, size, reduced)
    return data
