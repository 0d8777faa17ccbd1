"""The handle of one call over MPI, as torch.distributed wants it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as c10d
from torch import Tensor

from .progress import Call, Engine


class MPIWork(c10d.Work):
    """A call under way; dropping it does not end the call."""

    def __init__(self, engine: Engine, call: Call, seconds: float) -> None:
        """Take the call, what moves it on, and how long a wait may take."""
        super().__init__()
        self._engine, self._call, self._seconds = engine, call, seconds

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the results are there.

        Raises:
            DistBackendError: Not in time, or a message of another size came.
        """
        asked = 0.0 if timeout is None else timeout.total_seconds()
        self._engine.wait(self._call, asked if asked > 0 else self._seconds)
        if self._call.error is not None:
            raise self._call.error
        return True

    def is_completed(self) -> bool:
        """Return whether `wait()` would return at once."""
        return self._engine.look(self._call)

    def is_success(self) -> bool:
        """Return whether it is through, and well."""
        return self.is_completed() and self._call.error is None

    def exception(self) -> BaseException | None:
        """Return why it failed."""
        return self._call.error

    def result(self) -> list[Tensor]:
        """Return the tensors that hold the result."""
        return self._call.results

    def synchronize(self) -> None:
        """Wait, as for streams, of which there are none."""
        self.wait()

    def get_future(self) -> Any:
        """Return a future of the results."""
        return self._engine.future(self._call)

    def _source_rank(self) -> int:
        """Return the group's rank that a message came from."""
        return self._call.source
