"""When checkpoints are written: every so many steps, and after the last."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ..checkpoint import CheckpointError, Saving
from ..dist.errors import MismatchError, NonFiniteError


class Saver:
    """Saves while training goes on, and waits for the last one at the end.

    Args:
        save: Begins to write the state after so many steps.
        every: Steps between checkpoints; 0 saves none.
        start: Steps that were saved before.
    """

    def __init__(self, save: Callable[[int], Saving], every: int, start: int) -> None:
        self._save, self._every, self._saved = save, every, start
        self._saving: Saving | None = None

    def __enter__(self) -> Saver:
        return self

    def after(self, step: int) -> None:
        """Save after `step` steps, if it is time."""
        if self._every and step % self._every == 0:
            self._saving, self._saved = self._save(step), step

    def end(self, step: int) -> None:
        """Save the last of all steps, or that before a stop, if it is not saved."""
        if self._every and step > self._saved:
            self._saving, self._saved = self._save(step), step

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._saving is None:
            return
        if error is None:
            self._saving.wait()
        elif isinstance(error, NonFiniteError | MismatchError):  # on all ranks: none is waited for
            with suppress(CheckpointError):
                self._saving.wait()  # the last good one may be half-way
