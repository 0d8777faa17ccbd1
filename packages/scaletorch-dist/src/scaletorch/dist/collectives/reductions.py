"""Collectives that compute: all_reduce, reduce and reduce_scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..neighbours import calls
from ..neighbours.neighbours import MOST, Neighbours, neighbours_of
from . import hierarchy
from .arguments import check_list, check_member, check_target
from .checks import checking, compare, tells_failure
from .ops import Op
from .parts import as_one, reduce_parts
from .raw import (
    all_gather_single,
    movable,
    on_wire,
    process_group,
    raw_all_reduce,
    raw_reduce,
    route,
)
from .recipes import Recipe, recipe_for, reduce_blocks
from .work import Work, nothing, settled

Group = ProcessGroup | None


@overload
def all_reduce(
    data: Tensor, op: Op = ..., group: Group = ..., async_op: Literal[False] = ...
) -> None: ...
@overload
def all_reduce(
    data: Tensor, op: Op = ..., group: Group = ..., *, async_op: Literal[True]
) -> Work[None]: ...
@tells_failure
def all_reduce(
    data: Tensor, op: Op = "sum", group: Group = None, async_op: bool = False
) -> Work[None] | None:
    """Reduce `data` over the ranks, in place on every rank.

    Args:
        data: any strides, any device, leaves that require grad too; the same shape and dtype on
            every rank. Integers keep their dtype: sums wrap as torch's do, a mean is exact and
            truncated toward zero. Bools stay bools: a sum is "any", a product or mean "all".
        op: sum, mean, product, min, max, band, bor or bxor, or a ReduceOp. NaNs survive all.
        group: the default group by default.
        async_op: return a Work at once; `data` is right after its `wait()`.

    Raises:
        InvalidArgumentError: unknown op, or one that has no meaning for the dtype.
        NotInGroupError: this rank is outside the group.
    """
    check_target(data, "all_reduce")
    recipe = recipe_for(op, data.dtype)
    members = process_group(group)
    if members is None:
        return settled((), nothing, async_op)
    if checking():
        compare(members, "all_reduce", data, recipe.name)
    size = members.size()
    if size == 1 or data.numel() == 0:
        return settled((), nothing, async_op)
    buffer = recipe.pack(on_wire(data, members))
    if recipe.run in route(buffer, members).lacks:
        return _reduce_gathered(data.detach(), buffer, recipe, members, async_op)
    levels = hierarchy.hierarchy_of(members, async_op)
    handle = None
    if levels and buffer.nbytes >= hierarchy.LEAST:
        levels.all_reduce(buffer, recipe)
    elif near := neighbours_of(buffer, members, async_op):
        calls.all_reduce(near, [buffer], recipe.run)
    else:
        handle = raw_all_reduce(buffer, recipe.raw, members, async_op)
    if recipe.plain and buffer.data_ptr() == data.data_ptr():
        return Work((handle,), partial(_hold, buffer)) if async_op else None
    finish = partial(_unpack, data.detach(), buffer, recipe, size)
    return settled((handle,), finish, async_op)


@overload
def reduce(
    data: Tensor, dst: int = ..., op: Op = ..., group: Group = ..., async_op: Literal[False] = ...
) -> None: ...
@overload
def reduce(
    data: Tensor, dst: int = ..., op: Op = ..., group: Group = ..., *, async_op: Literal[True]
) -> Work[None]: ...
@tells_failure
def reduce(
    data: Tensor, dst: int = 0, op: Op = "sum", group: Group = None, async_op: bool = False
) -> Work[None] | None:
    """Reduce `data` over the ranks, in place on rank `dst`; other ranks keep theirs.

    Args:
        data: as in `all_reduce`.
        dst: global rank that gets the result.
        op: as in `all_reduce`.
        group: the default group by default.
        async_op: return a Work at once.

    Raises:
        InvalidArgumentError: unknown op, or one that has no meaning for the dtype.
        NotInGroupError: `dst` or this rank is outside the group.
    """
    check_target(data, "reduce")
    recipe = recipe_for(op, data.dtype)
    members = process_group(group)
    mine = check_member(dst, "dst", group)
    if members is None:
        return settled((), nothing, async_op)
    if checking():
        compare(members, "reduce", data, recipe.name, f"dst={dst}")
    size = members.size()
    if size == 1 or data.numel() == 0:
        return settled((), nothing, async_op)
    data = data.detach()
    buffer = recipe.pack(on_wire(data, members))
    near = neighbours_of(buffer, members, async_op)
    if near is None and buffer.data_ptr() == data.data_ptr() and not mine:
        buffer = buffer.clone()  # backends leave partial results in it
    if recipe.run in route(buffer, members).lacks:
        target = data if mine else torch.empty_like(data)
        return _reduce_gathered(target, buffer, recipe, members, async_op)
    handle = None
    if near:
        calls.reduce(near, buffer, dst, recipe.run)
    else:
        handle = raw_reduce(buffer, dst, recipe.raw, members, async_op)
    finish = partial(_unpack, data, buffer, recipe, size) if mine else partial(_hold, buffer)
    return settled((handle,), finish, async_op)


@overload
def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Op = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
) -> None: ...
@overload
def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Op = ...,
    group: Group = ...,
    *,
    async_op: Literal[True],
) -> Work[None]: ...
@tells_failure
def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
) -> Work[None] | None:
    """Reduce entry i of every rank's `input_list` into rank i's `output`.

    16-bit floats may be reduced in float32 and rounded once.

    Args:
        output: filled in place; shape of this rank's entry. Shapes may differ from rank to rank.
        input_list: one tensor a rank, of one dtype; not changed.
        op: as in `all_reduce`.
        group: the default group by default.
        async_op: return a Work at once; `output` is right after its `wait()`.

    Raises:
        InvalidArgumentError: unknown op, one that has no meaning for the dtype, another number of
            tensors than ranks, or one that does not fit `output`.
        NotInGroupError: this rank is outside the group.
    """
    check_target(output, "reduce_scatter", "output")
    recipe = recipe_for(op, output.dtype)
    members = process_group(group)
    size, rank = (1, 0) if members is None else (members.size(), members.rank())
    check_list(input_list, size, "reduce_scatter", "input_list", dtype=output.dtype)
    check_list([input_list[rank]], 1, "reduce_scatter", f"input_list[{rank}]", like=output)
    if members is not None and checking():
        compare(members, "reduce_scatter", list(input_list), recipe.name)
    if members is None or size == 1:
        output.detach().copy_(input_list[0].detach())
        return settled((), nothing, async_op)
    entries = [on_wire(entry, members).view(-1) for entry in input_list]
    levels = hierarchy.hierarchy_of(members, async_op)
    if levels:
        _unpack(output.detach(), levels.reduce_scatter(entries, recipe), recipe, size)
        return None
    flat = as_one(entries)
    if flat.numel() == 0:
        return settled((), nothing, async_op)
    counts = [entry.numel() for entry in input_list]
    reduced, handle = reduce_parts(flat, counts, recipe, members, async_op)
    finish = partial(_unpack_later, output.detach(), reduced, recipe, size)
    return settled((handle,), finish, async_op)


def all_reduce_near(near: Neighbours, tensors: Sequence[Tensor], op: Op) -> None:
    """Reduce tensors in place, together, through the memory of neighbours."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for data in tensors:
        if data.numel():
            by_dtype.setdefault(data.dtype, []).append(data.detach())
    for dtype, alike in by_dtype.items():
        recipe = recipe_for(op, dtype)
        for start in range(0, len(alike), MOST):
            some = alike[start : start + MOST]
            buffers = [recipe.pack(on_wire(data, near.group)) for data in some]
            calls.all_reduce(near, buffers, recipe.run)
            for data, buffer in zip(some, buffers, strict=True):
                _unpack(data, buffer, recipe, near.group.size())


def _reduce_gathered(
    data: Tensor, buffer: Tensor, recipe: Recipe, members: ProcessGroup, async_op: bool
) -> Work[None] | None:
    """Reduce on this rank, where the backend cannot."""
    rows = buffer.new_empty(members.size() * buffer.numel())
    handle = all_gather_single(movable(rows), movable(buffer).view(-1), members, async_op)
    finish = partial(_reduce_packed, data, rows, recipe, members.size(), keep=buffer)
    return settled((handle,), finish, async_op)


def _reduce_packed(data: Tensor, rows: Tensor, recipe: Recipe, size: int, keep: Tensor) -> None:
    _unpack(data, reduce_blocks(rows.view(size, rows.numel() // size), recipe.run), recipe, size)


def _unpack_later(data: Tensor, reduced: Callable[[], Tensor], recipe: Recipe, size: int) -> None:
    _unpack(data, reduced(), recipe, size)


def _unpack(data: Tensor, buffer: Tensor, recipe: Recipe, size: int) -> None:
    """Bring a reduced buffer home to `data`."""
    result = recipe.unpack(buffer, size)
    if result.data_ptr() != data.data_ptr():
        data.copy_(result.view(data.shape))


def _hold(buffer: Tensor) -> None:
    """Keep `buffer` alive until the work is done."""
