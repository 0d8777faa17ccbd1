"""Messages from one rank to another, singly, to a peer, and in batches; peers are global ranks.

A message needs a matching receive of the same dtype and element count. Messages with one tag
between two ranks arrive in the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Protocol, overload

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from ..errors import InvalidArgumentError
from ..wire import port
from ..wire.backend import MOVABLE, bring_home, movable, on_wire, process_group, route
from ..wire.checks import comparing
from ..wire.message_ends import Agreement, agree
from ..wire.port import note, post
from ..wire.work import Work, nothing
from ..world.info import get_rank
from .arguments import check_member, check_tag, check_target, check_tensor
from .batches import MOST, batches

Message = tuple[Tensor, int]


def send(data: Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Send `data` and wait until it may be changed.

    Args:
        data: Any dtype, layout and device; not changed.
        dst: Global rank of the receiver, another member of `group`.
        group: The default group by default.
        tag: Tells messages between two ranks apart, on backends that have tags: gloo and MPI.

    Raises:
        NotInGroupError: `dst` or this rank is outside the group.
        InvalidArgumentError: `dst` is this rank; or a tag other than 0 on a backend without tags.
    """
    isend(data, dst, group, tag).wait()


def recv(data: Tensor, src: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Wait for a message from `src` and write it into `data`.

    Args:
        data: Filled in place; as many elements and the dtype of what was sent.
        src: Global rank of the sender, another member of `group`.
        group: The default group by default.
        tag: The sender's tag.

    Raises:
        NotInGroupError: `src` or this rank is outside the group.
        InvalidArgumentError: `src` is this rank; or a tag other than 0 on a backend without tags.
    """
    irecv(data, src, group, tag).wait()


def isend(data: Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Work[None]:
    """Start to send `data`; leave it unchanged and keep the handle until `wait()`.

    Args and errors as in `send`.
    """
    members = _to_other(data, dst, "dst", group)
    buffer, agreement = _outgoing(data, dst, members, tag)
    handle = post(c10d.isend, (buffer, dst, members, tag), note(data, dst, members, tag, True))
    return Work((handle, agreement), nothing, keep=buffer)


def irecv(data: Tensor, src: int, group: ProcessGroup | None = None, tag: int = 0) -> Work[None]:
    """Start to receive into `data`, which is filled after `wait()`.

    Args and errors as in `recv`.
    """
    check_target(data, "recv")
    members = _to_other(data, src, "src", group)
    buffer, agreement, finish = _incoming(data, src, members, tag)
    handle = post(c10d.irecv, (buffer, src, members, tag), note(data, src, members, tag, False))
    return Work((handle, agreement), finish, keep=buffer)


@overload
def exchange(
    sends: Sequence[Message] = ...,
    recvs: Sequence[Message] = ...,
    group: ProcessGroup | None = ...,
    async_op: Literal[False] = ...,
) -> None: ...
@overload
def exchange(
    sends: Sequence[Message] = ...,
    recvs: Sequence[Message] = ...,
    group: ProcessGroup | None = ...,
    *,
    async_op: Literal[True],
) -> Work[None]: ...
@overload
def exchange(
    sends: Sequence[Message], recvs: Sequence[Message], group: ProcessGroup | None, async_op: bool
) -> Work[None] | None: ...
def exchange(
    sends: Sequence[Message] = (),
    recvs: Sequence[Message] = (),
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work[None] | None:
    """Send and receive a batch of messages at once, in no order that could deadlock.

    A message to this rank itself is copied to its own receive, the first to the first. More than
    128 messages go in several batches, one after another.

    Args:
        sends: `(tensor, dst)` pairs; the tensors are not changed and must not be until done.
        recvs: `(tensor, src)` pairs; the tensors are filled in place.
        group: The default group by default; peers are global ranks in it.
        async_op: Return a Work at once; received tensors are filled after its `wait()`.

    Raises:
        NotInGroupError: A peer or this rank is outside the group.
        InvalidArgumentError: Sends to this rank itself do not match the receives from it.
    """
    members = process_group(group)
    sent, received = _peers(sends, "dst", group), _peers(recvs, "src", group)
    copies = _copies_to_self(
        [data for data, _, mine in sent if mine], [data for data, _, mine in received if mine]
    )
    work = _start(
        [(data, dst) for data, dst, mine in sent if not mine],
        [(data, src) for data, src, mine in received if not mine],
        members,
    )
    for target, source in copies:
        target.detach().copy_(source.detach())
    return work if async_op else work.wait()


def _peers(
    messages: Sequence[Message], name: str, group: ProcessGroup | None
) -> list[tuple[Tensor, int, bool]]:
    """Check the messages, and tell of each whether it stays on this rank."""
    checked = []
    for message in messages:
        if not isinstance(message, Sequence) or len(message) != 2:
            pairs = f"exchange needs (tensor, {name}) pairs, got {type(message).__name__}"
            raise InvalidArgumentError(pairs)
        data, peer = message
        (check_tensor if name == "dst" else check_target)(data, "exchange")
        checked.append((data, peer, check_member(peer, name, group)))
    return checked


def _start(
    sends: Sequence[Message], recvs: Sequence[Message], members: ProcessGroup | None
) -> Work[None]:
    if members is None or not (sends or recvs):
        return Work((), nothing)
    operations, agreements, finishes, notes = [], [], [], []
    for data, dst in sends:
        notes.append(note(data, dst, members, 0, True))
        buffer, agreement = _outgoing(data, dst, members, 0)
        operations.append(P2POp(c10d.isend, buffer, dst, members))
        agreements.append(agreement)
    for data, src in recvs:
        notes.append(note(data, src, members, 0, False))
        buffer, agreement, finish = _incoming(data, src, members, 0)
        operations.append(P2POp(c10d.irecv, buffer, src, members))
        agreements.append(agreement)
        finishes.append(finish)
    if len(operations) <= MOST:
        handles = post(c10d.batch_isend_irecv, (operations,), *notes)
    else:
        handles = []
        for batch in batches(operations, members.rank(), members.size()):
            chosen = [operations[i] for i in batch]
            handles += post(c10d.batch_isend_irecv, (chosen,), *(notes[i] for i in batch))
    return Work((*handles, *agreements), partial(_finish_all, finishes), keep=operations)


def _finish_all(finishes: list[Callable[[], None]]) -> None:
    for finish in finishes:
        finish()


def _outgoing(
    data: Tensor, dst: int, members: ProcessGroup, tag: int
) -> tuple[Tensor, Agreement | None]:
    """Return what to send for `data`, and what to wait for where the ends are compared."""
    check_tag(tag, data, members)
    agreement = agree(members, data, dst, tag, sends=True) if comparing() else None
    if agreement is not None and agreement.scratch is not None:
        return agreement.scratch, agreement
    return movable(on_wire(data, members)), agreement


def _incoming(
    data: Tensor, src: int, members: ProcessGroup, tag: int
) -> tuple[Tensor, Agreement | None, Callable[[], None]]:
    """Return what to receive into, what to wait for, and what then brings it home to `data`."""
    check_tag(tag, data, members)
    agreement = agree(members, data, src, tag, sends=False) if comparing() else None
    if agreement is not None and agreement.scratch is not None:
        return agreement.scratch, agreement, nothing
    data = data.detach()
    buffer = on_wire(data, members)
    return movable(buffer), agreement, partial(bring_home, data, buffer)


def _copies_to_self(sent: list[Tensor], received: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    shapes = [[(tuple(x.shape), x.dtype) for x in side] for side in (sent, received)]
    if shapes[0] != shapes[1]:
        message = (
            f"what rank {get_rank()} sends to itself, {shapes[0]}, "
            f"is not what it receives from itself, {shapes[1]}"
        )
        raise InvalidArgumentError(message)
    return list(zip(received, sent, strict=True))


def _to_other(data: Tensor, peer: int, name: str, group: ProcessGroup | None) -> ProcessGroup:
    """Check a message between this rank and another, and return the group it goes by."""
    check_tensor(data, "send" if name == "dst" else "recv")
    members = process_group(group)
    if check_member(peer, name, group) or members is None:
        message = f"{name}={peer} is this rank itself: only exchange() can send to its own rank"
        raise InvalidArgumentError(message)
    return members


class Handle(Protocol):
    """A message under way; keep it, and its tensor, until it is through."""

    def wait(self) -> object:
        """Wait until it is through; on devices with streams the current stream waits."""


class Peer:
    """One other rank of a group, by `send` and `receive`: a third of the host's time of `isend`.

    Whether the ends of messages are compared (see `checks`) is asked once, here.

    Args:
        rank: Global rank, another member of `group`.
        group: The default group by default.
        device: Where the tensors are.

    Raises:
        NotInGroupError: `rank` or this rank is outside the group.
        InvalidArgumentError: `rank` is this rank.
    """

    def __init__(self, rank: int, group: ProcessGroup | None, device: torch.device) -> None:
        members = process_group(group)
        if check_member(rank, "rank", group) or members is None:
            raise InvalidArgumentError(f"rank={rank} is this rank itself, not a peer")
        self._rank, self._members = rank, members
        self._place = c10d.get_group_rank(members, rank)
        self._direct = not comparing() and route(torch.empty(0, device=device), members).native

    def send(self, data: Tensor) -> Handle:
        """Start to send `data`; leave it unchanged until `wait()`. It must not require grad."""
        if self._direct and _plain(data):
            return self._post(self._members.send, data, True)
        return isend(data, self._rank, self._members)

    def receive(self, data: Tensor) -> Handle:
        """Start to receive into `data`, which is filled after `wait()`."""
        if self._direct and _plain(data):
            return self._post(self._members.recv, data, False)
        return irecv(data, self._rank, self._members)

    def _post(self, call: Callable[..., Handle], data: Tensor, sends: bool) -> Handle:
        told = port.guard
        if told is None:
            return call([data], self._place, 0)
        note = told.record_message(self._members, data, self._rank, 0, sends)
        handle: Handle = told.run_noted((note,), call, [data], self._place, 0)
        return handle


def _plain(data: Tensor) -> bool:
    """Return whether a backend takes a tensor as it is."""
    return data.dtype in MOVABLE and data.is_contiguous() and not data.is_neg()
