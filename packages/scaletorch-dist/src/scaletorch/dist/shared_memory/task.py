"""One piece of work that ranks do in one another's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .meeting import Meeting

Act = Callable[[Sequence[Sequence[int]]], Tensor]


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
