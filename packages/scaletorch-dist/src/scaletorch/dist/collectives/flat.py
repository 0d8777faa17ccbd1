"""Flat buffers of which each rank owns a part: reduced to the owners, and gathered from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import InvalidArgumentError
from ..transport.ways import arrived, way_of
from ..wire.backend import on_wire, process_group
from ..wire.checks import checking, compare, tells_failure
from ..wire.recipes import recipe_for
from ..wire.sums import fold
from ..wire.work import Work, nothing, settled

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
        return Work((), partial(_summed, data.device, start, divisor, 1, data.detach()))
    if checking():
        compare(members, "reduce_scatter_flat", data, list(counts), op, f"ordered={ordered}")
    wire = on_wire(data, members)
    way = way_of(wire, members, True)
    if not ordered:
        done = partial(_summed, data.device, start, divisor, 1)
        recipe = recipe_for("sum", wire.dtype)
        return cast(Work[Tensor], way.reduce_scatter(wire, counts, recipe, done, True))
    done = partial(_summed, data.device, start, divisor, size)
    return cast(Work[Tensor], way.exchange(wire, counts, [counts[rank]] * size, done, True))


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
    done = arrived if wire.data_ptr() == data.data_ptr() else partial(_written, data)
    return way_of(wire, members, async_op).gather_flat(wire, counts, done, async_op)


def _check(data: Tensor, counts: Sequence[int], size: int, call: str) -> None:
    if data.ndim != 1 or len(counts) != size or sum(counts) != data.numel():
        raise InvalidArgumentError(
            f"{call} takes a flat tensor and its elements for each of {size} ranks, got shape "
            f"{tuple(data.shape)} and {list(counts)}"
        )


def _summed(
    device: torch.device, start: Tensor | None, divisor: int, blocks: int, data: Tensor
) -> Tensor:
    """Add blocks of equal length, one after another in memory, behind `start`."""
    return fold(data.view(blocks, data.numel() // blocks), start, divisor).to(device)


def _written(data: Tensor, wire: Tensor) -> None:
    data.copy_(wire)
