"""Ranks telling one another where they are, by small messages that nobody need wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from ..collectives.p2p import note, post
from ..info import group_ranks

_AWAITED = -(2**62)  # no rank says this


class Meeting:
    """Every rank says a few numbers, some time, and hears those of all others.

    Meetings of one tag are held in one order on all ranks. What arrives takes no collective, so
    meetings go on beside the group's other calls, and a rank that dies shows as in any of them.

    Args:
        group: The ranks.
        tag: Of the messages.
        count: Numbers that each rank says.
    """

    def __init__(self, group: ProcessGroup, tag: int, count: int) -> None:
        self._group, self._tag = group, tag
        self._heard = torch.full((group.size(), count), _AWAITED)
        self._said: Tensor | None = None
        self._sends: list[Any] = []
        self._receives = [
            self._message(c10d.irecv, self._heard[rank], peer, sends=False)
            for rank, peer in self._others()
        ]

    def say(self, numbers: Sequence[int]) -> None:
        """Tell this rank's numbers, once."""
        self._said = torch.tensor(numbers)
        self._heard[self._group.rank()] = self._said
        self._sends = [
            self._message(c10d.isend, self._said, peer, sends=True) for _, peer in self._others()
        ]

    def is_over(self) -> bool:
        """Return whether all have been heard; then `wait` does not wait."""
        return _AWAITED not in self._heard[:, 0].tolist()

    def wait(self) -> list[list[int]]:
        """Wait until all have been heard, and return everyone's numbers."""
        for work in (*self._receives, *self._sends):
            if work is not None:
                work.wait()
        self._receives, self._sends = [], []  # a message whose handle is dropped early is lost
        rows: list[list[int]] = self._heard.tolist()
        return rows

    def _message(self, call: Callable[..., Any], data: Tensor, peer: int, *, sends: bool) -> Any:
        known = note(data, peer, self._group, self._tag, sends)
        return post(call, (data, peer, self._group, self._tag), known)

    def _others(self) -> list[tuple[int, int]]:
        """Return the other ranks, in the group and of all."""
        every = enumerate(group_ranks(self._group))
        return [(rank, peer) for rank, peer in every if rank != self._group.rank()]
