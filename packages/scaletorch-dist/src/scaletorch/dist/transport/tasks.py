"""Work that ranks do in one another's memory: when all are ready, until all are done.

They tell one another how far they are by small messages that nobody need wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from ..wire.port import note, post
from ..world.info import group_ranks

_AWAITED = -(2**62)  # no rank says this

Act = Callable[[Sequence[Sequence[int]]], Tensor]


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


class Task:
    """Work that begins when every rank is ready, and is over when every rank has done its part.

    Args:
        ready: Where ranks say what they share.
        done: Where they say that they are through with the others' memory.
        act: This rank's part, given what all have said; returns the result.
    """

    def __init__(self, ready: Meeting, done: Meeting, act: Act) -> None:
        self._ready, self._done = ready, done
        self._act: Act | None = act
        self._result: Any = None
        self._error: Exception | None = None
        self._over = False

    def advance(self, *, wait: bool) -> bool:
        """Do this rank's part, if all are ready; return whether it is done."""
        if self._act is not None and (wait or self._ready.is_over()):
            act, self._act = self._act, None
            try:
                self._result = act(self._ready.wait())
            except Exception as error:  # whoever waits for this work is to get it
                self._error = error
            self._done.say((1,))  # nobody waits for a rank that failed
        return self._act is None

    def is_over(self) -> bool:
        """Return whether all ranks have done their parts."""
        return self._over or (self._act is None and self._done.is_over())

    def close(self) -> None:
        """Wait until all ranks have done their parts, whatever has come of this one's."""
        if not self._over:
            self._done.wait()
            self._over = True

    def finish(self) -> Tensor:
        """Wait until all ranks have done their parts, and return the result, once.

        Raises:
            Exception: What this rank's part has raised.
        """
        self.close()
        if self._error is not None:
            raise self._error
        result, self._result = self._result, None
        return result  # type: ignore[no-any-return]
