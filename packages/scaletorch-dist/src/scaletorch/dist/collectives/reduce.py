"""Collectives that compute: all_reduce, reduce and reduce_scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, overload

from torch import Tensor
from torch.distributed import ProcessGroup

from ..transport.ways import arrived, way_of
from ..wire.backend import on_wire, process_group, route
from ..wire.checks import checking, compare, tells_failure
from ..wire.ops import Op
from ..wire.recipes import Recipe, recipe_for
from ..wire.sums import as_one
from ..wire.work import Work, nothing, settled
from .arguments import check_list, check_member, check_target

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
        data: Any strides, any device, leaves that require grad too; the same shape and dtype on
            every rank. Integers keep their dtype: sums wrap as torch's do, a mean is exact and
            truncated toward zero. Bools stay bools: a sum is "any", a product or mean "all".
        op: Sum, mean, product, min, max, band, bor or bxor, or a ReduceOp. NaNs survive all.
        group: The default group by default.
        async_op: Return a Work at once; `data` is right after its `wait()`.

    Raises:
        InvalidArgumentError: Unknown op, or one that has no meaning for the dtype.
        NotInGroupError: This rank is outside the group.
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
    recipe = _recipe_on(op, data, members)
    buffer = on_wire(data, members, reduced=True)
    if not recipe.plain:
        buffer = recipe.pack(buffer)
    if recipe.plain and buffer.data_ptr() == data.data_ptr():
        done: Callable[[Tensor], None] = partial(_in_place, data)
    else:
        done = partial(unpack_into, data.detach(), recipe, size)
    return way_of(buffer, members).all_reduce(buffer, recipe, done, async_op)


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
        data: As in `all_reduce`.
        dst: Global rank that gets the result.
        op: As in `all_reduce`.
        group: The default group by default.
        async_op: Return a Work at once.

    Raises:
        InvalidArgumentError: Unknown op, or one that has no meaning for the dtype.
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
    recipe = _recipe_on(op, data, members)
    buffer = recipe.pack(on_wire(data, members, reduced=True))
    if buffer.data_ptr() == data.data_ptr() and not mine:
        buffer = buffer.clone()  # backends leave partial results in it
    done = partial(unpack_into, data, recipe, size) if mine else arrived
    return way_of(buffer, members).reduce(buffer, dst, recipe, done, async_op)


@overload
def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Op = ..., group: Group = ...,
    async_op: Literal[False] = ...,
) -> None: ...  # fmt: skip
@overload
def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Op = ..., group: Group = ...,
    *, async_op: Literal[True],
) -> Work[None]: ...  # fmt: skip
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
        output: Filled in place; shape of this rank's entry. Shapes may differ from rank to rank.
        input_list: One tensor a rank, of one dtype; not changed.
        op: As in `all_reduce`.
        group: The default group by default.
        async_op: Return a Work at once; `output` is right after its `wait()`.

    Raises:
        InvalidArgumentError: Unknown op, one that has no meaning for the dtype, another number of
            tensors than ranks, or one that does not fit `output`.
        NotInGroupError: This rank is outside the group.
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
    recipe = _recipe_on(op, output, members)
    entries = [on_wire(entry, members).view(-1) for entry in input_list]
    flat = as_one(entries)
    if flat.numel() == 0:
        return settled((), nothing, async_op)
    counts = [entry.numel() for entry in input_list]
    done = partial(unpack_into, output.detach(), recipe, size)
    return way_of(flat, members).reduce_scatter(flat, counts, recipe, done, async_op)


def _recipe_on(op: Op, data: Tensor, group: ProcessGroup) -> Recipe:
    """Return how to reduce a tensor on a group, of which the backend may not know its dtype."""
    return recipe_for(op, data.dtype, data.dtype in route(data, group).reduces)


def _in_place(data: Tensor, reduced: Tensor) -> None:
    """Bring the result to `data`, unless the tensor itself was reduced."""
    if reduced is not data and reduced.data_ptr() != data.data_ptr():
        data.detach().copy_(reduced.view(data.shape))


def unpack_into(data: Tensor, recipe: Recipe, size: int, reduced: Tensor) -> None:
    """Bring a reduced tensor home to `data`.

    Args:
        data: Is filled.
        recipe: What packed it.
        size: Ranks whose tensors were reduced.
        reduced: The packed result.
    """
    result = reduced if recipe.plain else recipe.unpack(reduced, size)
    if result.data_ptr() != data.data_ptr():
        data.copy_(result.view(data.shape))
