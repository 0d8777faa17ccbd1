"""Joins, shards and sums: of tensors along a dim, and of flat buffers with a shard for each rank.

The functions for tensors along a dim serve the differentiable collectives. They record no graph and
change no input; with one rank they send nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import InvalidArgumentError
from ..transport.ways import way_of
from ..wire.backend import (
    Group,
    Work,
    all_to_all_single,
    bring_home,
    identity,
    movable,
    nothing,
    on_wire,
    process_group,
    settled,
)
from ..wire.checks import begin, checking, compare
from ..wire.recipes import as_one, even_counts, recipe_for, sum_dtype
from ..world.info import get_world_size
from .reduce import all_reduce


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Return the sum of every rank's `x`."""
    members = process_group(group)
    if members is None or members.size() == 1:
        return x
    result = x.detach().clone(memory_format=torch.contiguous_format)
    all_reduce(result, "sum", members)
    return result


def join(x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None = None) -> Tensor:
    """Return every rank's `x` joined along `dim`, in rank order."""
    dim = _check_dim(x, dim)
    members = process_group(group)
    lengths = _check_sizes(x, dim, members, sizes, "all_gather", whole=False)
    if members is None or members.size() == 1:
        return x
    _compare("all_gather", x, members, dim, lengths)
    if lengths is None or min(lengths) == max(lengths):
        stacked = _blocks(x, members)
        if any(size != 1 for size in x.shape[:dim]):
            return torch.cat(stacked.unbind(0), dim).to(x.device)
        joint = (*x.shape[:dim], members.size() * x.size(dim), *x.shape[dim + 1 :])
        return stacked.view(joint).to(x.device)
    padded = x.new_empty((*x.shape[:dim], max(lengths), *x.shape[dim + 1 :]))
    padded.narrow(dim, 0, x.size(dim)).copy_(x.detach())
    blocks = _blocks(padded, members).unbind(0)
    filled = [block.narrow(dim, 0, length) for block, length in zip(blocks, lengths, strict=True)]
    return torch.cat(filled, dim).to(x.device)


def shard_of(x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None = None) -> Tensor:
    """Return a copy of this rank's shard of `x` along `dim`."""
    dim = _check_dim(x, dim)
    members = process_group(group)
    lengths = _shard_lengths(x, dim, members, sizes, "split")
    if len(lengths) == 1:
        return x
    rank = _rank(members)
    shard = x.detach().narrow(dim, sum(lengths[:rank]), lengths[rank])
    return shard.clone(memory_format=torch.contiguous_format)


def sum_shard(x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None = None) -> Tensor:
    """Return this rank's shard along `dim` of the sum of every rank's `x`."""
    dim = _check_dim(x, dim)
    members = process_group(group)
    lengths = _shard_lengths(x, dim, members, sizes, "reduce_scatter")
    if members is None or len(lengths) == 1:
        return x
    _compare("reduce_scatter", x, members, dim, lengths)
    length = lengths[members.rank()]
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    data = on_wire(x, members)
    if data.numel() == 0:
        return x.new_empty(shape)
    row = data.numel() // data.size(dim)
    counts = [count * row for count in lengths]
    recipe = recipe_for("sum", x.dtype)
    flat = as_one([shard.reshape(-1) for shard in data.split(lengths, dim)])  # in rank order
    done = partial(_as, x, shape)
    way = way_of(flat, members)
    return cast(Tensor, way.reduce_scatter(flat, counts, recipe, done, False))


def exchange_shards(x: Tensor, split_dim: int, concat_dim: int, group: Group) -> Tensor:
    """Send shard i along `split_dim` to rank i; return the received ones joined."""
    split_dim, concat_dim = _check_dim(x, split_dim), _check_dim(x, concat_dim)
    members = process_group(group)
    lengths = _shard_lengths(x, split_dim, members, None, "all_to_all")
    if members is None or len(lengths) == 1:
        return x
    _compare("all_to_all", x, members, split_dim, concat_dim)
    data = on_wire(x, members)
    sent = torch.stack(data.split(lengths, split_dim))
    received = torch.empty_like(sent)
    if sent.numel():
        all_to_all_single(movable(received), movable(sent), group=members)
    return torch.cat(received.unbind(0), concat_dim).to(x.device)


def _check_dim(x: Tensor, dim: int) -> int:
    """Return `dim` as a non-negative index; raise if `x` has no such dim."""
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        message = f"dim {dim} does not exist in a tensor of shape {tuple(x.shape)}"
        raise InvalidArgumentError(message)
    return dim % x.dim()


def _check_sizes(
    x: Tensor, dim: int, members: Group, sizes: Sequence[int] | None, call: str, *, whole: bool
) -> list[int] | None:
    """Check the ranks' sizes; `x` has their sum along `dim` if it is `whole`, or this rank's."""
    if sizes is None:
        return None
    lengths = [int(size) for size in sizes]
    count = 1 if members is None else members.size()
    if len(lengths) != count or min(lengths) < 0:
        raise InvalidArgumentError(
            f"{call} needs one length of 0 or more for each of the group's {count} ranks "
            f"in sizes, got {lengths}"
        )
    expected = sum(lengths) if whole else lengths[_rank(members)]
    if x.size(dim) != expected:
        what = "the sum of sizes" if whole else "this rank's entry of sizes"
        raise InvalidArgumentError(
            f"{what} is {expected}, but dim {dim} of the tensor of shape "
            f"{tuple(x.shape)} is {x.size(dim)}"
        )
    return lengths


def _shard_lengths(
    x: Tensor, dim: int, members: Group, sizes: Sequence[int] | None, call: str
) -> list[int]:
    """Return the length along `dim` of each rank's shard of `x`; raise if it cannot be split."""
    lengths = _check_sizes(x, dim, members, sizes, call, whole=True)
    if lengths is not None:
        return lengths
    count = 1 if members is None else members.size()
    length, rest = divmod(x.size(dim), count)
    if rest:
        way_out = "pad it" if call == "all_to_all" else "pad it or pass sizes"
        raise InvalidArgumentError(
            f"{call} cuts dim {dim} into {count} equal shards, one per rank, but its size "
            f"{x.size(dim)} (shape {tuple(x.shape)}) is not a multiple of {count}: {way_out}"
        )
    return [length] * count


def _compare(call: str, x: Tensor, members: ProcessGroup, dim: int = 0, more: Any = None) -> None:
    """Compare the call over the ranks if `check_collectives` asks for it."""
    if checking():
        lengths = isinstance(more, list)
        shape = [*x.shape[:dim], *x.shape[dim + 1 :]] if lengths else list(x.shape)
        compare(members, f"functional.{call}", x.dtype, shape, f"dim={dim}", more)


def _rank(members: Group) -> int:
    return 0 if members is None else members.rank()


def _blocks(data: Tensor, members: ProcessGroup) -> Tensor:
    """Return every rank's `data` stacked along a new dim 0; all have the same shape."""
    data = on_wire(data, members)
    if not data.numel():
        return data.new_empty((members.size(), *data.shape))
    return cast(Tensor, way_of(data, members).all_gather(data, identity, False))


def _as(x: Tensor, shape: Sequence[int], result: Tensor) -> Tensor:
    if result.shape != shape:
        result = result.view(shape)
    if result.dtype == x.dtype and result.device == x.device:
        return result
    return result.to(x.device, x.dtype)


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
