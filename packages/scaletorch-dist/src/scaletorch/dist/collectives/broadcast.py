"""Collectives with one source rank, broadcast and scatter; and the barrier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, overload

from torch import Tensor
from torch.distributed import ProcessGroup

from ..devices import get_comm_device
from ..errors import InvalidArgumentError
from ..transport.ways import arrived, way_of
from ..wire.backend import bring_home, broadcast_ints, on_wire, raw_barrier
from ..wire.checks import begin, check_list, check_member, check_target
from ..wire.work import Async, Group, Sync, Work, nothing, settled


@overload
def broadcast(data: Tensor, src: int = ..., group: Group = ..., async_op: Sync = ...) -> None: ...
@overload
def broadcast(
    data: Tensor, src: int = ..., group: Group = ..., *, async_op: Async
) -> Work[None]: ...
def broadcast(
    data: Tensor, src: int = 0, group: Group = None, async_op: bool = False
) -> Work[None] | None:
    """Copy `data` of rank `src` into `data` of every rank.

    Args:
        data: Filled in place; the same shape and dtype on every rank.
        src: Global rank to copy from.
        group: The default group by default.
        async_op: Return a Work at once; `data` holds the result after its `wait()`.

    Raises:
        NotInGroupError: `src` or this rank is outside the group.
    """
    check_target(data, "broadcast")
    mine = check_member(src, "src", group)
    members = begin(group, "broadcast", data, f"src={src}")
    if members is None or data.numel() == 0:
        return settled((), nothing, async_op)
    buffer = on_wire(data, members)
    done = arrived if mine else partial(bring_home, data.detach())
    return way_of(buffer, members).broadcast(buffer, src, done, async_op)


@overload
def scatter(
    data: Tensor, scatter_list: Sequence[Tensor] | None = ..., src: int = ..., group: Group = ...,
    async_op: Sync = ...,
) -> None: ...  # fmt: skip
@overload
def scatter(
    data: Tensor, scatter_list: Sequence[Tensor] | None = ..., src: int = ..., group: Group = ...,
    *, async_op: Async,
) -> Work[None]: ...  # fmt: skip
def scatter(
    data: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Work[None] | None:
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
    entries = [on_wire(entry, members) for entry in scatter_list or ()] if mine else None
    buffer = on_wire(data, members)
    done = partial(bring_home, data.detach())
    return way_of(buffer, members).scatter(buffer, entries, src, done, async_op)


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
    if device.type == "cpu":
        raw_barrier(members)
    else:  # without device_ids the backend guesses a device from the rank, and warns
        raw_barrier(members, device_ids=[device.index])
