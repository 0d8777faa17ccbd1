"""Flat buffers of which each rank owns a part: reduced to the owners, and gathered from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import InvalidArgumentError
from .checks import checking, compare, tells_failure
from .parts import exchange_parts
from .raw import (
    all_gather_single,
    movable,
    on_wire,
    process_group,
    raw_broadcast,
    reduce_scatter_single,
    route,
)
from .work import Work, nothing, settled

SCALED = {"sum": False, "mean": True}


@tells_failure
def reduce_scatter_flat(
    data: Tensor,
    counts: Sequence[int],
    op: str = "sum",
    group: ProcessGroup | None = None,
    *,
    ordered: bool = False,
    start: Tensor | None = None,
) -> Work[Tensor]:
    """Sum each rank's part of a flat buffer over the ranks, asynchronously.

    Args:
        data: flat floating-point or complex tensor; read until the work is waited for.
        counts: elements of each rank's part; the parts lie in rank order.
        op: ``"sum"`` or ``"mean"``.
        group: the default group by default.
        ordered: add in rank order on every backend, so that the bits depend on no partition.
        start: what the sum begins with (after division for ``"mean"``), this rank's part; only
            with ``ordered``.

    Returns:
        The work; its ``wait()`` gives this rank's part of the sum, new memory, 16-bit floats as
        float32.

    Raises:
        InvalidArgumentError: the parts are not the buffer's, or an unknown op.
    """
    members = process_group(group)
    size, rank = (1, 0) if members is None else (members.size(), members.rank())
    _check(data, counts, size, "reduce_scatter_flat")
    if op not in SCALED:
        raise InvalidArgumentError(f"op must be one of {', '.join(map(repr, SCALED))}, got {op!r}")
    divisor = size if SCALED[op] else 1
    if members is None or size == 1:
        return Work((), partial(_fold, data.detach().view(1, -1), start, divisor, keep=data))
    if checking():
        compare(members, "reduce_scatter_flat", data, list(counts), op, f"ordered={ordered}")
    wire, own = on_wire(data, members), counts[rank]
    way = route(wire, members)
    even = min(counts) == max(counts)
    if not ordered and even and way.backend != "gloo" and "reduce_scatter" not in way.lacks:
        output = wire.new_empty(own)
        handle = reduce_scatter_single(output, wire, c10d.ReduceOp.SUM, members, True)
        finish = partial(_fold, output.view(1, own), start, divisor, keep=wire)
    else:  # direct exchange, then one pass over what came: quicker on TCP, and in rank order
        received, handle = exchange_parts(wire, counts, [own] * size, members, True)
        finish = partial(_fold, received.view(size, own), start, divisor, keep=wire)
    return Work((handle,), partial(_back, finish, data.device))


@tells_failure
def all_gather_flat(
    data: Tensor, counts: Sequence[int], group: ProcessGroup | None = None, async_op: bool = False
) -> Work[None] | None:
    """Fill a flat buffer, of which every rank has its own part, with the parts of all, in place.

    Args:
        data: flat contiguous tensor of any dtype.
        counts: elements of each rank's part; the parts lie in rank order.
        group: the default group by default.
        async_op: return a Work at once; ``data`` is whole after its ``wait()``.

    Raises:
        InvalidArgumentError: the parts are not the buffer's.
    """
    members = process_group(group)
    size = 1 if members is None else members.size()
    _check(data, counts, size, "all_gather_flat")
    if members is None or size == 1 or not data.numel():
        return settled((), nothing, async_op)
    if checking():
        compare(members, "all_gather_flat", data, list(counts))
    wire = on_wire(data, members)
    parts = wire.split(list(counts))
    handles: list[Any]
    if min(counts) == max(counts):
        own = parts[members.rank()].clone()
        handles = [all_gather_single(movable(wire), movable(own), members, async_op)]
    else:
        own = wire
        ranks = c10d.get_process_group_ranks(members)
        filled = [(rank, part) for rank, part in zip(ranks, parts, strict=True) if part.numel()]
        handles = [raw_broadcast(movable(p), rank, members, async_op) for rank, p in filled]
    return settled(handles, partial(_written, data, wire, own), async_op)


def part_of(counts: Sequence[int], rank: int) -> range:
    """Return the elements of a rank's part."""
    ends = list(accumulate(counts, initial=0))
    return range(ends[rank], ends[rank + 1])


def _check(data: Tensor, counts: Sequence[int], size: int, call: str) -> None:
    if data.ndim != 1 or len(counts) != size or sum(counts) != data.numel():
        raise InvalidArgumentError(
            f"{call} takes a flat tensor and its elements for each of {size} ranks, got shape "
            f"{tuple(data.shape)} and {list(counts)}"
        )


def even_parts(elements: int, parts: int) -> list[int]:
    """Return counts that part so many elements evenly, the last parts shorter."""
    share = -(-elements // parts)
    return [max(min(share, elements - share * at), 0) for at in range(parts)]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a sum: float32 for 16-bit floats."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def fold(blocks: Sequence[Tensor] | Tensor, start: Tensor | None, divisor: int) -> Tensor:
    """Add blocks from the first to the last, in float32 at least, behind ``start``."""
    dtype = wide(blocks[0].dtype)
    if start is not None:
        total = start.to(dtype, copy=True)
        for block in blocks:
            total += block if divisor == 1 else block.to(dtype) / divisor
        return total
    if len(blocks) == 1:
        total = blocks[0].to(dtype, copy=True)
    else:
        total = torch.add(blocks[0].to(dtype), blocks[1])
    for block in blocks[2:]:
        total += block
    return total if divisor == 1 else total.div_(divisor)


def _fold(blocks: Tensor, start: Tensor | None, divisor: int, keep: Tensor) -> Tensor:
    return fold(blocks, start, divisor)


def _back(finish: Callable[[], Tensor], device: torch.device) -> Tensor:
    return finish().to(device)


def _written(data: Tensor, wire: Tensor, keep: Tensor) -> None:
    if wire.data_ptr() != data.data_ptr():
        data.copy_(wire)
