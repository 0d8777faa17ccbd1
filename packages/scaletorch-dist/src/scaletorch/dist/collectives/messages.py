"""Point-to-point messages, singly and in batches; peers are global ranks.

A message needs a matching receive of the same dtype and element count. Messages between two ranks
with the same tag arrive in the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as c10d
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from ..errors import InvalidArgumentError
from ..wire.backend import (
    Group,
    Work,
    bring_home,
    movable,
    note,
    nothing,
    on_wire,
    post,
    process_group,
)
from ..wire.checks import check_member, check_tag, check_target, check_tensor
from ..world.info import get_rank

Messages = Sequence[tuple[Tensor, int]]
MOST = 128  # messages per batch: NCCL splits longer ones, at different places on the two ranks


def send(data: Tensor, dst: int, group: Group = None, tag: int = 0) -> None:
    """Send `data` and wait until it may be overwritten.

    Args:
        data: Any dtype, strides and device; not changed.
        dst: Global rank of the receiver, another member of `group`.
        group: The default group by default.
        tag: Distinguishes messages between two ranks; only gloo and MPI have tags.

    Raises:
        NotInGroupError: `dst` or this rank is outside the group.
        InvalidArgumentError: `dst` is this rank, or the backend has no tags and `tag` is not 0.
    """
    isend(data, dst, group, tag).wait()


def recv(data: Tensor, src: int, group: Group = None, tag: int = 0) -> None:
    """Wait for a message from `src` and write it into `data`.

    `data` is filled in place, and has the dtype and element count of the sent tensor; `src` is the
    global rank of the sender. Other args and errors as in `send`.
    """
    irecv(data, src, group, tag).wait()


def isend(data: Tensor, dst: int, group: Group = None, tag: int = 0) -> Work[None]:
    """Start to send `data`; do not change it, and keep the returned Work, until `wait()`.

    Args and errors as in `send`.
    """
    members = _to_other(data, dst, "dst", group, tag)
    buffer = movable(on_wire(data, members))
    handle = post(c10d.isend, (buffer, dst, members, tag), note(data, dst, members, tag, True))
    return Work((handle,), nothing, keep=buffer)


def irecv(data: Tensor, src: int, group: Group = None, tag: int = 0) -> Work[None]:
    """Start to receive into `data`, which is filled after `wait()`.

    Args and errors as in `recv`.
    """
    check_target(data, "recv")
    members = _to_other(data, src, "src", group, tag)
    buffer = on_wire(data, members)
    call = movable(buffer), src, members, tag
    handle = post(c10d.irecv, call, note(data, src, members, tag, False))
    return Work((handle,), partial(bring_home, data.detach(), buffer), keep=buffer)


def exchange(
    sends: Messages = (), recvs: Messages = (), group: Group = None, async_op: bool = False
) -> Work[None] | Any:
    """Send and receive a batch of messages at once, without deadlock in any order.

    A message to this rank itself is copied into its own receive: the first send to the first
    receive, and so on.

    Args:
        sends: `(tensor, dst)` pairs; the caller must not change the tensors until done.
        recvs: `(tensor, src)` pairs; the tensors are filled in place.
        group: The default group by default; peers are global ranks in it.
        async_op: Return a Work at once; received tensors are filled after its `wait()`.

    Raises:
        NotInGroupError: A peer or this rank is outside the group.
        InvalidArgumentError: Sends of this rank to itself do not match its receives from itself, or
            there are more than 128 messages.
    """
    to_self, sends = _checked(sends, "dst", group)
    from_self, recvs = _checked(recvs, "src", group)
    shapes = [[(tuple(x.shape), x.dtype) for x in side] for side in (to_self, from_self)]
    if shapes[0] != shapes[1]:
        raise InvalidArgumentError(
            f"what rank {get_rank()} sends to itself, {shapes[0]}, "
            f"is not what it receives from itself, {shapes[1]}"
        )
    work = _start(sends, recvs, process_group(group))
    for target, source in zip(from_self, to_self, strict=True):
        target.detach().copy_(source.detach())
    return work if async_op else work.wait()


def _checked(messages: Messages, name: str, group: Group) -> tuple[list[Tensor], Messages]:
    """Check messages; return the tensors of those to or from this rank itself, and the others."""
    own, others = [], []
    for message in messages:
        if not isinstance(message, Sequence) or len(message) != 2:
            pairs = f"exchange needs (tensor, {name}) pairs, got {type(message).__name__}"
            raise InvalidArgumentError(pairs)
        data, peer = message
        (check_tensor if name == "dst" else check_target)(data, "exchange")
        if check_member(peer, name, group):
            own.append(data)
        else:
            others.append((data, peer))
    return own, others


def _start(sends: Messages, recvs: Messages, members: Group) -> Work[None]:
    if members is None or not (sends or recvs):
        return Work((), nothing)
    if len(sends) + len(recvs) > MOST:
        raise InvalidArgumentError(
            f"exchange takes {MOST} messages at once, got {len(sends)} sends and {len(recvs)} "
            "receives: backends cut longer batches, not at the same places on both ends, and wait "
            "for one another; use all_to_all, or several calls"
        )
    buffers = [on_wire(data, members) for data, _ in recvs]
    operations = [
        P2POp(c10d.isend, movable(on_wire(data, members)), dst, members) for data, dst in sends
    ] + [
        P2POp(c10d.irecv, movable(buffer), src, members)
        for buffer, (_, src) in zip(buffers, recvs, strict=True)
    ]
    notes = [note(data, dst, members, 0, True) for data, dst in sends]
    notes += [note(data, src, members, 0, False) for data, src in recvs]
    handles = post(c10d.batch_isend_irecv, (operations,), *notes)

    def finish() -> None:
        for (target, _), buffer in zip(recvs, buffers, strict=True):
            bring_home(target.detach(), buffer)

    return Work(handles, finish, keep=operations)


def _to_other(data: Tensor, peer: int, name: str, group: Group, tag: int) -> ProcessGroup:
    """Check a message between this rank and another, and return its process group."""
    check_tensor(data, "send" if name == "dst" else "recv")
    members = process_group(group)
    if check_member(peer, name, group) or members is None:
        message = f"{name}={peer} is this rank itself: only exchange() can send to its own rank"
        raise InvalidArgumentError(message)
    check_tag(tag, data, members)
    return members
