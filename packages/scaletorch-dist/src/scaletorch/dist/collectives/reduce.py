"""Reducing collectives: all_reduce, reduce and reduce_scatter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from ..transport.ways import way_of
from ..wire.backend import (
    Group,
    Work,
    as_real,
    nothing,
    on_wire,
    raw_reduce,
    route,
    settled,
)
from ..wire.checks import begin, check_list, check_member, check_target
from ..wire.recipes import Op, Recipe, as_one, recipe_for
from ..world.info import get_dist_info


def all_reduce(
    data: Tensor, op: Op = "sum", group: Group = None, async_op: bool = False
) -> Work[None] | Any:
    """Reduce `data` over the ranks, in place on every rank.

    Args:
        data: The same shape and dtype on every rank, with any strides, on any device; may be a
            leaf that requires grad. Integers keep their dtype: sums wrap as in torch, a mean is
            exact and truncated toward zero. For bools a sum is "any", a product or mean "all".
        op: Sum, mean, product, min, max, band, bor or bxor, or a ReduceOp. Every op keeps NaNs.
        group: The default group by default.
        async_op: Return a Work at once; `data` holds the result after its `wait()`.

    Raises:
        InvalidArgumentError: The op is unknown, or undefined for the dtype.
        NotInGroupError: This rank is outside the group.
    """
    check_target(data, "all_reduce")
    recipe = recipe_for(op, data.dtype)
    members = begin(group, "all_reduce", data, recipe.name)
    if members is None or data.numel() == 0:
        return settled((), nothing, async_op)
    recipe = _recipe_on(op, data, members)
    buffer = recipe.pack(on_wire(data, members, reduced=True))
    done = partial(_unpack_into, data, recipe, members.size())
    return way_of(buffer, members).all_reduce(buffer, recipe, done, async_op)


def reduce(
    data: Tensor, dst: int = 0, op: Op = "sum", group: Group = None, async_op: bool = False
) -> Work[None] | Any:
    """Reduce `data` over the ranks, in place on rank `dst`; `data` of other ranks is unchanged.

    `dst` is a global rank of the group. Other args and errors as in `all_reduce`.
    """
    check_target(data, "reduce")
    recipe = recipe_for(op, data.dtype)
    mine = check_member(dst, "dst", group)
    members = begin(group, "reduce", data, recipe.name, f"dst={dst}")
    if members is None or data.numel() == 0:
        return settled((), nothing, async_op)
    recipe = _recipe_on(op, data, members)
    buffer = recipe.pack(on_wire(data, members, reduced=True))
    if buffer.data_ptr() == data.data_ptr() and not mine:
        buffer = buffer.clone()  # backends write partial results into it
    done = partial(_unpack_into, data, recipe, members.size()) if mine else nothing
    way = way_of(buffer, members)
    if way.lacks(recipe, buffer):
        return way.reduce_here(buffer, recipe, done, async_op)
    handle = raw_reduce(as_real(buffer), dst, recipe.raw, members, async_op)
    return settled((handle,), partial(done, buffer), async_op)


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
) -> Work[None] | Any:
    """Reduce entry i of every rank's `input_list` into rank i's `output`.

    16-bit floats may be reduced in float32 and rounded once.

    Args:
        output: Filled in place; has the shape of this rank's entry. Entries may differ in shape.
        input_list: One tensor per rank, all of one dtype; not changed.
        op: As in `all_reduce`.
        group: The default group by default.
        async_op: Return a Work at once; `output` holds the result after its `wait()`.

    Raises:
        InvalidArgumentError: The op is unknown or undefined for the dtype, the list does not have
            one tensor per rank, or this rank's entry does not fit `output`.
        NotInGroupError: This rank is outside the group.
    """
    check_target(output, "reduce_scatter", "output")
    recipe = recipe_for(op, output.dtype)
    rank, size = get_dist_info(group)
    check_list(input_list, size, "reduce_scatter", "input_list", dtype=output.dtype)
    check_list([input_list[rank]], 1, "reduce_scatter", f"input_list[{rank}]", like=output)
    members = begin(group, "reduce_scatter", list(input_list), recipe.name)
    if members is None:
        output.detach().copy_(input_list[0].detach())
        return settled((), nothing, async_op)
    recipe = _recipe_on(op, output, members)
    entries = [on_wire(entry, members).view(-1) for entry in input_list]
    flat = as_one(entries)
    if flat.numel() == 0:
        return settled((), nothing, async_op)
    counts = [entry.numel() for entry in input_list]
    done = partial(_unpack_into, output, recipe, size)
    return way_of(flat, members).reduce_scatter(flat, counts, recipe, done, async_op)


def _recipe_on(op: Op, data: Tensor, group: ProcessGroup) -> Recipe:
    """Return the recipe to reduce a tensor on a group; its backend may not support the dtype."""
    return recipe_for(op, data.dtype, data.dtype in route(data, group).reduces)


def _unpack_into(data: Tensor, recipe: Recipe, size: int, reduced: Tensor) -> None:
    """Unpack a tensor that was reduced over `size` ranks into `data`."""
    result = recipe.unpack(reduced, size)
    if result.data_ptr() != data.data_ptr():
        data.detach().copy_(result.view(data.shape))
