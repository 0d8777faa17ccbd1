"""Collectives that copy tensors: all_gather, gather, broadcast and scatter; and the barrier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..devices import get_comm_device
from ..errors import InvalidArgumentError
from ..transport.ways import way_of
from ..wire.backend import (
    Async,
    Group,
    Sync,
    Work,
    bring_home,
    broadcast_ints,
    movable,
    nothing,
    on_wire,
    raw_barrier,
    raw_broadcast,
    raw_gather,
    raw_scatter,
    route,
    settled,
)
from ..wire.checks import (
    begin,
    check_form_with_list,
    check_list,
    check_member,
    check_target,
    check_tensor,
)
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

    `data` has the same shape and dtype on every rank; `dst` is a global rank of the group. Other
    args as in `all_gather`.

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
    if "gather" in route(wire, members).lacks:
        return way_of(wire, members).all_gather(wire, done, async_op)
    rows = wire.new_empty((members.size() if mine else 0, *wire.shape))
    entries = [movable(row) for row in rows.unbind(0)] if mine else None
    handle = raw_gather(movable(wire), entries, dst, members, async_op)
    return settled((handle,), partial(done, rows), async_op, keep=wire)


def _alone(data: Tensor, members: Group, mine: bool = True) -> list[Tensor]:
    count = 1 if members is None else members.size()
    copies = count if mine else 0
    return [data.detach().clone(memory_format=torch.contiguous_format) for _ in range(copies)]


def _listed(device: torch.device, rows: Tensor, mine: bool = True) -> list[Tensor]:
    return list(rows.to(device).unbind(0)) if mine else []


def _fill(targets: Sequence[Tensor], sources: Any) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.detach().copy_(source)


def broadcast(
    data: Tensor, src: int = 0, group: Group = None, async_op: bool = False
) -> Work[None] | Any:
    """Copy `data` of rank `src` into `data` of every rank.

    `data` has the same shape and dtype on every rank; `src` is a global rank of the group. Other
    args as in `all_reduce`.

    Raises:
        NotInGroupError: `src` or this rank is outside the group.
    """
    check_target(data, "broadcast")
    mine = check_member(src, "src", group)
    members = begin(group, "broadcast", data, f"src={src}")
    if members is None or data.numel() == 0:
        return settled((), nothing, async_op)
    wire = on_wire(data, members)
    handle = raw_broadcast(movable(wire), src, members, async_op)
    done = nothing if mine else partial(bring_home, data.detach(), wire)
    return settled((handle,), done, async_op)


def scatter(
    data: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Work[None] | Any:
    """Copy entry i of the list on rank `src` into `data` of the group's rank i.

    Only `src` knows the list, so it first broadcasts whether the list fits: a bad list is an error
    on every rank.

    Args:
        data: Filled in place; the same shape and dtype on every rank.
        scatter_list: On `src`, one tensor like `data` per rank; ignored on other ranks.
        src: Global rank that has the list.
        group: The default group by default.
        async_op: Return a Work at once; `data` holds the result after its `wait()`.

    Raises:
        InvalidArgumentError: The list does not fit; raised on every rank.
        NotInGroupError: `src` or this rank is outside the group.
    """
    check_target(data, "scatter")
    mine = check_member(src, "src", group)
    members = begin(group, "scatter", data, f"src={src}")
    _check_list_of_root(scatter_list, data, src, mine, members)
    if members is None or data.numel() == 0:
        source = scatter_list[0] if scatter_list else data
        return settled((), partial(bring_home, data.detach(), source.detach()), async_op)
    entries = [movable(on_wire(entry, members)) for entry in scatter_list or ()] if mine else None
    wire = on_wire(data, members)
    handle = raw_scatter(movable(wire), entries, src, members, async_op)
    done = partial(bring_home, data.detach(), wire)
    return settled((handle,), done, async_op, keep=entries)


def _check_list_of_root(tensors: Any, data: Tensor, src: int, mine: bool, members: Group) -> None:
    """Check the list of rank `src`, and raise on every rank if it does not fit."""
    size = 1 if members is None else members.size()
    error = None
    if mine:
        try:
            check_list(tensors, size, "scatter", "scatter_list", like=data)
        except InvalidArgumentError as found:
            error = found
    if members is not None:
        (bad,) = broadcast_ints([int(error is not None)], src, members)
        if bad and error is None:
            message = f"scatter: the list of rank {src} does not fit; see the error of that rank"
            raise InvalidArgumentError(message)
    if error is not None:
        raise error


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait until every rank of a group has called this; return at once if it has one rank.

    Raises:
        NotInGroupError: This rank is outside the group.
    """
    members = begin(group, "barrier")
    if members is None:
        return
    device = get_comm_device(members)
    # Without device_ids an accelerator's backend guesses a device from the rank, and warns.
    raw_barrier(members, device_ids=None if device.type == "cpu" else [device.index])
