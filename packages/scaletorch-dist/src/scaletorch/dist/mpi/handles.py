"""MPI calls in flight. They advance while their rank is inside MPI: in any wait or query."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable
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


class Engine:
    """The module `mpi4py.MPI`, and the calls of this process that are in flight."""

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.lock = threading.RLock()  # held inside MPI, which may support one thread at a time
        self._active: list[MPIWork] = []  # also keeps the buffers of works that were dropped
        self._late = False  # whether a call has timed out
        atexit.register(self._end)  # runs before mpi4py's handler, which finalizes MPI

    def start(self, work: MPIWork) -> MPIWork:
        """Start a call and return it.

        A barrier waits first for earlier collectives of its group, also those whose handles were
        dropped.
        """
        for earlier in list(self._active) if work.name == "barrier" else ():
            if earlier.group is work.group and earlier.name not in ("send", "recv"):
                self.wait(earlier, work.seconds)
        with self.lock:
            work.issue(self.mpi)
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
    """A non-blocking call and its handle; dropping it does not cancel the call."""

    def __init__(
        self,
        engine: Engine,
        group: Any,
        name: str,  # for error messages
        issue: Issue,
        results: list[Tensor],  # the tensors that hold the result
        finish: Callable[[], None] | None,  # called once after all requests have completed
        expected: int | None,  # bytes that the one request must receive; None accepts any number
        seconds: float,
    ) -> None:
        super().__init__()
        self.group, self.name, self.seconds = group, name, seconds
        self._engine, self._results, self._expected = engine, results, expected
        self._calls: tuple[Any, ...] = issue, finish  # they keep the buffers alive; () if done
        self._requests: list[Any] = []
        self._error: BaseException | None = None

    def issue(self, mpi: Any) -> None:
        """Start the call. Requires the engine's lock."""
        self._requests = self._calls[0](mpi, self.group.communicator)

    def look(self, mpi: Any) -> bool:
        """Return whether the call is done, completing it if so. Requires the engine's lock."""
        if not self._calls:
            return True
        try:
            status, sized = mpi.Status(), self._expected is not None
            if not mpi.Request.Testall(self._requests, [status] if sized else None):
                return False
            if sized and (came := status.Get_count(mpi.BYTE)) != self._expected:
                raise DistBackendError(
                    f"a message of {came} bytes from rank {status.Get_source()} of the group came "
                    f"where {self._expected} were expected: sender and receiver must agree in "
                    "dtype and size"
                )
            if self._calls[1] is not None:
                self._calls[1]()
        except BaseException as error:
            self._error = error
        self._calls, self._requests = (), []  # frees the buffers
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is done; raise if it times out or a message has another size."""
        asked = 0.0 if timeout is None else timeout.total_seconds()
        self._engine.wait(self, asked if asked > 0 else self.seconds)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait: there are no streams to synchronize."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether `wait()` would return at once."""
        if self._calls:
            self._engine.poll()
        return not self._calls

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
