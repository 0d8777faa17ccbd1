"""Another rank, for many small messages: what can be checked once is checked once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import InvalidArgumentError
from ..wire import port
from ..wire.backend import MOVABLE, process_group, route
from ..wire.checks import comparing
from .arguments import check_member
from .messages import irecv, isend


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
