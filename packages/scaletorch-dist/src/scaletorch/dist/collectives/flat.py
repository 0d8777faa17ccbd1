"""Collectives on flat buffers in which each rank owns a shard of its own length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import InvalidArgumentError
from ..transport.ways import way_of
from ..wire.backend import bring_home, on_wire, process_group
from ..wire.checks import begin
from ..wire.recipes import recipe_for
from ..wire.sums import even_counts, sum_dtype
from ..wire.work import Work, identity, nothing, settled
from ..world.info import get_world_size
from .reduce import all_reduce


def all_reduce_flat(
    data: Tensor, op: str = "sum", group: ProcessGroup | None = None
) -> Work[Tensor]:
    """Sum a flat buffer over the ranks, in place and asynchronously.

    16-bit floats are summed in float32 and rounded once on every backend, whereas the all-reduces
    of NCCL and Gloo round at each rank. The traffic is the same; half of it follows `wait()`.

    Args:
        data: Flat contiguous tensor, floating-point or complex.
        op: `"sum"` or `"mean"`.
        group: The default group by default.

    Returns:
        A Work; its `wait()` returns `data`.

    Raises:
        InvalidArgumentError: `data` is not flat, or the op is unknown.
    """
    if data.ndim != 1:
        raise InvalidArgumentError(f"all_reduce_flat takes a flat tensor, got {tuple(data.shape)}")
    _is_mean(op)
    members = process_group(group)
    if members is not None and members.size() > 1 and data.numel() > 0 and _is_narrow(data):
        counts = even_counts(data.numel(), members.size())
        shard = reduce_scatter_flat(data, counts, op, members)
        return Work((shard,), partial(_put_together, data, counts, members, shard))
    return Work((all_reduce(data, op, group, async_op=True),), partial(identity, data))


def reduce_scatter_flat(
    data: Tensor, counts: Sequence[int], op: str = "sum", group: ProcessGroup | None = None
) -> Work[Tensor]:
    """Reduce-scatter a flat buffer, asynchronously; shards may differ in length.

    16-bit floats are summed in float32 on every backend. `data` is floating-point or complex, and
    must not change until `wait()` returns; `counts` are the elements of each rank's shard, in rank
    order. Other args as in `all_reduce_flat`.

    Returns:
        A Work; its `wait()` returns this rank's shard of the sum in new memory, 16-bit floats as
        float32.

    Raises:
        InvalidArgumentError: `counts` do not fit `data` and the ranks, or the op is unknown.
    """
    size = get_world_size(group)
    _check(data, counts, size, "reduce_scatter_flat")
    divisor = size if _is_mean(op) else 1
    members = begin(group, "reduce_scatter_flat", data, list(counts), op)
    if members is None:
        return Work((), lambda: data.detach().to(sum_dtype(data.dtype), copy=True))
    wire = on_wire(data, members)
    way = way_of(wire, members)
    call = way.fold_scatter if _is_narrow(wire) else way.reduce_scatter
    done = partial(_divided, divisor, data.device)
    return cast(Work[Tensor], call(wire, counts, recipe_for("sum", wire.dtype), done, True))


def all_gather_flat(
    data: Tensor, counts: Sequence[int], group: ProcessGroup | None = None, async_op: bool = False
) -> Work[None] | None:
    """All-gather a flat buffer in place: each rank has filled its own shard beforehand.

    Args:
        data: Flat contiguous tensor of any dtype.
        counts: Elements of each rank's shard; the shards lie in rank order.
        group: The default group by default.
        async_op: Return a Work at once; `data` is complete after its `wait()`.

    Raises:
        InvalidArgumentError: `counts` do not fit `data` and the ranks.
    """
    _check(data, counts, get_world_size(group), "all_gather_flat")
    members = begin(group, "all_gather_flat", data, list(counts))
    if members is None or not data.numel():
        return settled((), nothing, async_op)
    wire = on_wire(data, members)
    return way_of(wire, members).gather_flat(wire, counts, partial(bring_home, data), async_op)


def _check(data: Tensor, counts: Sequence[int], size: int, call: str) -> None:
    if data.ndim != 1 or len(counts) != size or sum(counts) != data.numel():
        raise InvalidArgumentError(
            f"{call} takes a flat tensor and its elements for each of {size} ranks, got shape "
            f"{tuple(data.shape)} and {list(counts)}"
        )


def _is_narrow(data: Tensor) -> bool:
    """Return whether a backend may round a sum in this dtype at each rank."""
    return sum_dtype(data.dtype) is not data.dtype


def _is_mean(op: str) -> bool:
    if op not in ("sum", "mean"):
        raise InvalidArgumentError(f"op must be one of 'sum', 'mean', got {op!r}")
    return op == "mean"


def _divided(divisor: int, device: torch.device, shard: Tensor) -> Tensor:
    return (shard if divisor == 1 else shard.div_(divisor)).to(device)


def _put_together(
    data: Tensor, counts: Sequence[int], group: ProcessGroup, shard: Work[Tensor]
) -> Tensor:
    """Write this rank's shard of a sum into the buffer, and all-gather the other shards."""
    data.split(list(counts))[group.rank()].copy_(shard.wait())
    all_gather_flat(data, counts, group)
    return data
