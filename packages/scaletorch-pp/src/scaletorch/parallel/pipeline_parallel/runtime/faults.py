"""A stage that raises in the middle of a step: every rank of the pipeline learns why, soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import ProcessGroup, distributed_c10d

from ....dist import all_gather, all_gather_object, get_comm_device
from ....dist.errors import ScaletorchError
from ...pg_manager import describe_rank

PERIOD = 0.2  # seconds between looks at what the others say
ANSWER = 5.0  # seconds that the store gets: the process that holds it may have stopped


class StageError(ScaletorchError, RuntimeError):
    """A stage on another rank raised in the middle of a step; the message has that error."""


class Watch:
    """The word of a step's failure, passed among the ranks of a pipeline.

    Args:
        group: The pipeline; None in one process.
        step: A name of the step that all its ranks know, and no other step has.
    """

    def __init__(self, group: ProcessGroup | None, step: str) -> None:
        # Another copy of this package, vendored under its own name, may number its steps alike.
        self._group, self._key = group, f"{__name__}/{step}"
        self._store = None if group is None else _store()
        self._looked = time.monotonic()
        self._own: str | None = None

    def look(self) -> None:
        """Raise if another rank has failed; they are asked at most every `PERIOD` seconds.

        Raises:
            StageError: One has; the message is its own.
        """
        if time.monotonic() - self._looked < PERIOD:
            return
        self._looked = time.monotonic()
        first = self._first()
        if first is not None:
            raise StageError(first)

    def report(self, error: Exception, where: str) -> None:
        """Tell the others; the first one to do so is heard."""
        if isinstance(error, StageError):
            return
        self._own = _text(error, where)
        first = self._ask(lambda store: store.compare_set(self._key, "", self._own).decode())
        if first not in (None, self._own):  # it may have come of that, by what was missing then
            error.add_note(f"Before that, {first}")

    def settle(self, error: Exception | None) -> str | None:
        """End the step, on all ranks; return the message of the first that failed, or None."""
        if self._group is None:
            return None
        failed = torch.tensor([error is not None], device=get_comm_device(self._group))
        if not any(map(bool, all_gather(failed, group=self._group))):
            return None
        texts = [t for t in all_gather_object(self._own, group=self._group) if t is not None]
        return self._first() or texts[0]

    def _first(self) -> str | None:
        """Return the message of the first rank that failed, or None."""
        return self._ask(lambda s: s.get(self._key).decode() if s.check([self._key]) else None)

    def _ask(self, question: Callable[[Any], str | None]) -> str | None:
        """Ask the store; None if it does not answer, now and for the rest of the step."""
        answers: list[str | None] = []

        def ask(store: Any) -> None:
            with suppress(Exception):
                answers.append(question(store))

        if self._store is not None:
            thread = threading.Thread(target=ask, args=(self._store,), daemon=True)
            thread.start()
            thread.join(ANSWER)
            if not answers:
                self._store = None
        return answers[0] if answers else None


def _text(error: Exception, where: str) -> str:
    """Say who failed where, with the type and the message of the error from the first line on."""
    kind = type(error)
    own = kind.__module__ in ("builtins", "__main__")
    name = kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    text = f"{describe_rank()} failed in {where}: {name}: {error}{notes}"
    return text.encode(errors="backslashreplace").decode()  # a store takes UTF-8 alone


def _store() -> Any:
    """Return the store where all ranks meet, or None under MPI."""
    try:
        return distributed_c10d._get_default_store()
    except ValueError:
        return None
