"""A stage that raises in the middle of a step: every rank of the pipeline learns why, soon."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.distributed import ProcessGroup, distributed_c10d

from ...dist import all_gather, all_gather_object, get_comm_device
from ...dist.errors import ScaletorchError
from ..pg_manager import describe_rank

PERIOD = 0.2  # seconds between looks at what the others say


class StageError(ScaletorchError, RuntimeError):
    """A stage on another rank raised in the middle of a step; the message has what it raised."""


class Watch:
    """What the ranks of a pipeline tell each other of a step's failure.

    Args:
        group: The pipeline; None in one process.
        step: A name of the step that all its ranks know, and no other step has.
    """

    def __init__(self, group: ProcessGroup | None, step: str) -> None:
        self._group, self._key = group, f"scaletorch/pipeline/{step}"
        self._store = None if group is None else _store()
        self._looked = time.monotonic()

    def look(self) -> None:
        """Raise if another rank has failed; it is asked at most every `PERIOD` seconds.

        Raises:
            StageError: One has; the message is its own.
        """
        if self._store is None or time.monotonic() - self._looked < PERIOD:
            return
        self._looked = time.monotonic()
        if self._store.check([self._key]):
            raise StageError(self._store.get(self._key).decode())

    def report(self, error: Exception, where: str) -> None:
        """Tell the others; the first one to do so is heard."""
        if self._store is not None and not isinstance(error, StageError):
            self._store.compare_set(self._key, "", _text(error, where))

    def settle(self, error: Exception | None, where: str) -> None:
        """End the step, on all ranks.

        Raises:
            StageError: Another rank has failed, and this one has not.
        """
        if self._group is None:
            return
        failed = torch.tensor([error is not None], device=get_comm_device(self._group))
        if not any(map(bool, all_gather(failed, group=self._group))):
            return
        own = None if error is None or isinstance(error, StageError) else _text(error, where)
        texts = [text for text in all_gather_object(own, group=self._group) if text is not None]
        if error is None:
            raise StageError(self._store.get(self._key).decode() if self._store else texts[0])


def _text(error: Exception, where: str) -> str:
    return f"{describe_rank()} failed in {where}: {type(error).__name__}: {error}"


def _store() -> Any:
    """Return where all ranks meet; there is none under MPI."""
    try:
        return distributed_c10d._get_default_store()
    except ValueError:
        return None
