"""MPI calls in flight. They advance while their rank is inside MPI: in any wait or query."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import DistBackendError

_SPINS = 100  # polls of a waiting call before it yields: small messages arrive by then
_EAGER = 0.05  # seconds for which a waiting call polls without sleep: large messages need many
_NAP = 1e-4  # seconds between later polls
_LAST_WORDS = 1.0  # seconds before the job is aborted, for mpirun to read the ranks' last output


# Starts a call, given the module `mpi4py.MPI` and the communicator; returns MPI's requests.
Issue = Callable[[Any, Any], list[Any]]


@dataclass(slots=True)
class Call:
    """A non-blocking call; it keeps its buffers alive through its functions."""

    name: str  # for error messages
    issue: Issue
    results: list[Tensor]  # the tensors that hold the result
    finish: Callable[[], None] | None = None  # called once after all requests have completed
    expected: int | None = None  # bytes that the one request must receive; None accepts any number


class Engine:
    """The module `mpi4py.MPI`, and the calls of this process that are in flight."""

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.lock = threading.RLock()  # held inside MPI, which may support one thread at a time
        self._active: list[MPIWork] = []  # also keeps the buffers of works that were dropped
        self._late = False  # whether a call has timed out
        atexit.register(self._end)  # runs before mpi4py's handler, which finalizes MPI

    def start(self, call: Call, seconds: float, group: Any) -> MPIWork:
        """Start a call of a group.

        A barrier waits first for earlier collectives of its group, also those whose handles were
        dropped.
        """
        for earlier in list(self._active) if call.name == "barrier" else ():
            if earlier.group is group and earlier.name not in ("send", "recv"):
                self.wait(earlier, seconds)
        with self.lock:
            requests = call.issue(self.mpi, group.communicator)
            work = MPIWork(self, call, requests, seconds, group)
            self._active.append(work)
        return work

    def poll(self) -> None:
        """Complete the calls that MPI has finished."""
        with self.lock:
            self._active = [work for work in self._active if not work.look(self.mpi)]

    def wait(self, work: MPIWork, seconds: float) -> None:
        """Wait until a call is done; after an error the group is unusable."""
        for _ in range(_SPINS):
            if work.is_completed():
                return
        start = time.monotonic()
        while not work.is_completed():
            waited = time.monotonic() - start
            if waited > seconds:
                self._late = True
                raise DistBackendError(
                    f"{work.name} over MPI did not end within {seconds:g} s: some rank of the "
                    "group has not called it, has ended, or is late"
                )
            time.sleep(0 if waited < _EAGER else _NAP)  # 0 yields to other threads and ranks

    def _end(self) -> None:
        """Abort the job after a failure, since MPI would wait for all ranks."""
        failed = self._late or getattr(sys, "last_value", None) is not None  # an uncaught exception
        if failed and self.mpi.COMM_WORLD.Get_size() > 1:
            sys.stderr.flush()
            time.sleep(_LAST_WORDS)
            self.mpi.COMM_WORLD.Abort(1)


class MPIWork(c10d.Work):
    """The handle of a call in flight; dropping it does not cancel the call."""

    def __init__(
        self, engine: Engine, call: Call, requests: list[Any], seconds: float, group: Any
    ) -> None:
        super().__init__()
        self.name, self.group = call.name, group
        self._call: Call | None = call
        self._requests = requests
        self._engine, self._seconds = engine, seconds
        self._results, self._source = call.results, -1
        self._error: BaseException | None = None

    def look(self, mpi: Any) -> bool:
        """Return whether the call is done, completing it if so. Requires the engine's lock."""
        call = self._call
        if call is None:
            return True
        try:
            statuses = None if call.expected is None else [mpi.Status()]
            if not mpi.Request.Testall(self._requests, statuses):
                return False
            if statuses is not None:
                came, self._source = statuses[0].Get_count(mpi.BYTE), statuses[0].Get_source()
                if came != call.expected:
                    raise DistBackendError(
                        f"a message of {came} bytes from rank {self._source} of the group came "
                        f"where {call.expected} were expected: sender and receiver must agree in "
                        "dtype and size"
                    )
            if call.finish is not None:
                call.finish()
        except BaseException as error:
            self._error = error
        self._call, self._requests = None, []  # frees the buffers
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is done; raise if it times out or a message has another size."""
        asked = 0.0 if timeout is None else timeout.total_seconds()
        self._engine.wait(self, asked if asked > 0 else self._seconds)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait: there are no streams to synchronize."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether `wait()` would return at once."""
        if self._call is not None:
            self._engine.poll()
        return self._call is None

    def result(self) -> list[Tensor]:
        """Return the tensors that hold the result."""
        return self._results

    def get_future(self) -> Any:
        """Wait, and return a completed future of the results."""
        future: Any = torch.futures.Future()
        try:
            self.wait()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(self._results)
        return future

    def _source_rank(self) -> int:
        """Return the sender of the received message, as a rank of the group."""
        return self._source
