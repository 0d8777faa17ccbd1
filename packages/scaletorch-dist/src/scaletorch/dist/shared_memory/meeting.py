"""Ranks telling one another where they are, by small messages that nobody need wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

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
            c10d.irecv(self._heard[rank], group=group, tag=tag, group_src=rank)
            for rank in self._others()
        ]

    def say(self, numbers: Sequence[int]) -> None:
        """Tell this rank's numbers, once."""
        self._said = torch.tensor(numbers)
        self._heard[self._group.rank()] = self._said
        self._sends = [
            c10d.isend(self._said, group=self._group, tag=self._tag, group_dst=rank)
            for rank in self._others()
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

    def _others(self) -> list[int]:
        return [rank for rank in range(self._group.size()) if rank != self._group.rank()]
