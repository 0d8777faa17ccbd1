"""Gathering collectives: all_gather and gather."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor

from ..transport.ways import way_of
from ..wire.backend import on_wire
from ..wire.checks import (
    begin,
    check_form_with_list,
    check_list,
    check_member,
    check_target,
    check_tensor,
)
from ..wire.work import Async, Group, Sync, Work, settled
from ..world.info import get_world_size


@overload
def all_gather(data: Tensor, group: Group = ..., async_op: Sync = ...) -> list[Tensor]: ...
@overload
def all_gather(data: Tensor, group: Group = ..., *, async_op: Async) -> Work[list[Tensor]]: ...
@overload
def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = ..., async_op: Sync = ...
) -> None: ...
@overload
def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = ..., *, async_op: Async
) -> Work[None]: ...
def all_gather(*args: Any, **options: Any) -> Any:
    """Gather a tensor from every rank, in the group's order.

    `all_gather(data, group=None, async_op=False)` returns a list of new tensors, all views of one
    buffer; `all_gather(tensor_list, tensor, group=None, async_op=False)` fills a list.

    Args:
        args: This rank's tensor, of the same shape and dtype on every rank; in the second form it
            follows the list to fill.
        options: `group` (the default group by default); `async_op` (return a Work at once, whose
            `wait()` returns the list, or None after the given list is filled).

    Returns:
        The list in the first form, None in the second.

    Raises:
        InvalidArgumentError: An argument is not a tensor, or the list does not fit.
        NotInGroupError: This rank is outside the group.
    """
    data = args[0] if args else options.get("data")
    if isinstance(data, Tensor):
        return _all_gather(*args, **options)
    names = ("tensor_list", "tensor")
    check_form_with_list(args, options, names, "all_gather", "a list to fill and a tensor")
    return _all_gather_into(*args, **options)


def _all_gather(
    data: Tensor, group: Group = None, async_op: bool = False
) -> list[Tensor] | Work[list[Tensor]]:
    check_tensor(data, "all_gather")
    members = begin(group, "all_gather", data)
    if members is None or data.numel() == 0:
        return settled((), partial(_alone, data, members), async_op)
    wire = on_wire(data, members)
    done = partial(_listed, data.device)
    return way_of(wire, members).all_gather(wire, done, async_op)


def _all_gather_into(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
) -> Work[None] | None:
    check_tensor(tensor, "all_gather", "tensor")
    size = get_world_size(group)
    check_list(tensor_list, size, "all_gather", "tensor_list", like=tensor)
    for entry in tensor_list:
        check_target(entry, "all_gather", "tensor_list")
    members = begin(group, "all_gather", tensor)
    if members is None or tensor.numel() == 0:
        return settled((), partial(_fill, tensor_list, [tensor.detach()] * size), async_op)
    wire = on_wire(tensor, members)
    done = partial(_fill, tensor_list)
    return way_of(wire, members).all_gather(wire, done, async_op)


@overload
def gather(
    data: Tensor, dst: int = ..., group: Group = ..., async_op: Sync = ...
) -> list[Tensor]: ...
@overload
def gather(
    data: Tensor, dst: int = ..., group: Group = ..., *, async_op: Async
) -> Work[list[Tensor]]: ...
def gather(
    data: Tensor, dst: int = 0, group: Group = None, async_op: bool = False
) -> list[Tensor] | Work[list[Tensor]]:
    """Gather a tensor from every rank on rank `dst`.

    Args:
        data: This rank's tensor, of the same shape and dtype on every rank.
        dst: Global rank that gets the list.
        group: The default group by default.
        async_op: Return a Work at once, whose `wait()` returns the list.

    Returns:
        A list of new tensors in the group's order on `dst`, `[]` on other ranks.

    Raises:
        InvalidArgumentError: `data` is not a tensor.
        NotInGroupError: `dst` or this rank is outside the group.
    """
    check_tensor(data, "gather")
    mine = check_member(dst, "dst", group)
    members = begin(group, "gather", data, f"dst={dst}")
    if members is None or data.numel() == 0:
        return settled((), partial(_alone, data, members, mine), async_op)
    wire = on_wire(data, members)
    done = partial(_listed, data.device, mine=mine)
    return way_of(wire, members).gather(wire, dst, done, async_op)


def _alone(data: Tensor, members: Group, mine: bool = True) -> list[Tensor]:
    count = 1 if members is None else members.size()
    copies = count if mine else 0
    return [data.detach().clone(memory_format=torch.contiguous_format) for _ in range(copies)]


def _listed(device: torch.device, rows: Tensor, mine: bool = True) -> list[Tensor]:
    return list(rows.to(device).unbind(0)) if mine else []


def _fill(targets: Sequence[Tensor], sources: Any) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.detach().copy_(source)
