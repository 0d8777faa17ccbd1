"""Collectives that collect: all_gather and gather."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import InvalidArgumentError
from ..neighbours import calls
from ..neighbours.neighbours import neighbours_of
from .arguments import check_list, check_member, check_target, check_tensor
from .checks import checking, compare, tells_failure
from .hierarchy import hierarchy_of
from .raw import all_gather_single, movable, on_wire, process_group, raw_gather, route
from .work import Work, settled

Group = ProcessGroup | None


@overload
def all_gather(
    data: Tensor, group: Group = ..., async_op: Literal[False] = ...
) -> list[Tensor]: ...
@overload
def all_gather(
    data: Tensor, group: Group = ..., *, async_op: Literal[True]
) -> Work[list[Tensor]]: ...
@overload
def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: Group = ...,
    async_op: Literal[False] = ...,
) -> None: ...
@overload
def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = ..., *, async_op: Literal[True]
) -> Work[None]: ...
@tells_failure
def all_gather(*args: Any, **options: Any) -> Any:
    """Collect a tensor from every rank, in the group's order.

    `all_gather(data, group=None, async_op=False)` returns a list of new tensors, parts of one
    block of memory; `all_gather(tensor_list, tensor, group=None, async_op=False)` fills a list.

    Args:
        args: this rank's tensor, the same shape and dtype on every rank; in the second form after
            the list to fill.
        options: `group` (the default group by default); `async_op` (return a Work at once, whose
            `wait()` returns the list, or None once the given one is filled).

    Returns:
        The list in the first form, None in the second.

    Raises:
        InvalidArgumentError: no tensor, or a list that does not fit.
        NotInGroupError: this rank is outside the group.
    """
    data = args[0] if args else options.get("data")
    if isinstance(data, Tensor):
        return _all_gather(*args, **options)
    lists = "tensor_list" in options or isinstance(data, Sequence)
    if not lists or not (len(args) > 1 or "tensor" in options):
        message = (
            f"all_gather needs a tensor, or a list to fill and a tensor, got {type(data).__name__}"
        )
        raise InvalidArgumentError(message)
    return _all_gather_into(*args, **options)


def _all_gather(
    data: Tensor, group: Group = None, async_op: bool = False
) -> list[Tensor] | Work[list[Tensor]]:
    check_tensor(data, "all_gather")
    members = process_group(group)
    if members is not None and checking():
        compare(members, "all_gather", data)
    if members is None or members.size() == 1 or data.numel() == 0:
        return settled((), partial(_alone, data, members), async_op)
    own, rows, handle = _start(data, members, async_op)
    return settled((handle,), partial(_listed, rows, data, own), async_op)


def _all_gather_into(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
) -> Work[None] | None:
    check_tensor(tensor, "all_gather", "tensor")
    members = process_group(group)
    size = 1 if members is None else members.size()
    check_list(tensor_list, size, "all_gather", "tensor_list", like=tensor)
    for entry in tensor_list:
        check_target(entry, "all_gather", "tensor_list")
    if members is not None and checking():
        compare(members, "all_gather", tensor)
    if members is None or size == 1 or tensor.numel() == 0:
        finish = partial(_fill, tensor_list, [tensor.detach()] * size, tensor)
        return settled((), finish, async_op)
    own, rows, handle = _start(tensor, members, async_op)
    return settled((handle,), partial(_fill, tensor_list, rows, own), async_op)


def _start(data: Tensor, members: ProcessGroup, async_op: bool) -> tuple[Tensor, Tensor, Any]:
    own = on_wire(data, members)
    levels = hierarchy_of(members, async_op)
    if levels:
        return own, levels.all_gather(own), None
    rows = own.new_empty((members.size(), *own.shape))
    handle = None
    if near := neighbours_of(own, members, async_op):
        calls.all_gather(near, rows, own)
    else:
        flat = movable(rows).view(-1)
        handle = all_gather_single(flat, movable(own).view(-1), members, async_op)
    return own, rows, handle


@overload
def gather(
    data: Tensor, dst: int = ..., group: Group = ..., async_op: Literal[False] = ...
) -> list[Tensor]: ...
@overload
def gather(
    data: Tensor, dst: int = ..., group: Group = ..., *, async_op: Literal[True]
) -> Work[list[Tensor]]: ...
@tells_failure
def gather(
    data: Tensor, dst: int = 0, group: Group = None, async_op: bool = False
) -> list[Tensor] | Work[list[Tensor]]:
    """Collect a tensor from every rank on rank `dst`.

    Args:
        data: this rank's tensor, the same shape and dtype on every rank.
        dst: global rank that gets the list.
        group: the default group by default.
        async_op: return a Work at once, whose `wait()` returns the list.

    Returns:
        On `dst` a list of new tensors in the group's order, elsewhere `[]`.

    Raises:
        InvalidArgumentError: no tensor.
        NotInGroupError: `dst` or this rank is outside the group.
    """
    check_tensor(data, "gather")
    members = process_group(group)
    mine = check_member(dst, "dst", group)
    if members is not None and checking():
        compare(members, "gather", data, f"dst={dst}")
    if members is None or members.size() == 1 or data.numel() == 0:
        return settled((), partial(_alone, data, members, mine), async_op)
    if "gather" in route(data, members).lacks:
        own, rows, handle = _start(data, members, async_op)
    else:
        own = on_wire(data, members)
        rows = own.new_empty((members.size() if mine else 0, *own.shape))
        handle = None
        if near := neighbours_of(own, members, async_op):
            calls.gather(near, rows if mine else None, own)
        else:
            parts = [movable(row) for row in rows.unbind(0)] if mine else None
            handle = raw_gather(movable(own), parts, dst, members, async_op)
    return settled((handle,), partial(_listed, rows, data, own, mine), async_op)


def _alone(data: Tensor, members: Group, mine: bool = True) -> list[Tensor]:
    count = 1 if members is None else members.size()
    copies = count if mine else 0
    return [data.detach().clone(memory_format=torch.contiguous_format) for _ in range(copies)]


def _listed(rows: Tensor, data: Tensor, keep: Tensor, mine: bool = True) -> list[Tensor]:
    return list(rows.to(data.device).unbind(0)) if mine else []


def _fill(targets: Sequence[Tensor], sources: Any, keep: Tensor) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.detach().copy_(source)
