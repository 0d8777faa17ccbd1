"""MPI calls in flight, and their progress: by waiting threads and by one background thread.

MPI advances non-blocking calls only while some thread is inside MPI. So a thread polls them while
there are any; it sleeps if there have been none for a while, and ends before MPI is finalized.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import DistBackendError

_NAP = 1e-4  # seconds between polls of the thread
_LAST_WORDS = 1.0  # seconds before the job is aborted, for mpirun to read the ranks' last output
_IDLE_LOOKS = 1000  # polls without work before the thread sleeps
_SPINS = 100  # polls of a waiting call before it yields: small messages arrive by then
_EAGER = 0.05  # seconds for which a waiting call polls without sleep: large messages need many


class Call:
    """One non-blocking call.

    Attributes:
        name: Name for error messages.
        results: The tensors that hold the result.
        done: Whether the call has finished, with or without an error.
        error: The error, or None.
        source: Rank that sent the received message; -1 before that.
    """

    def __init__(
        self,
        name: str,
        requests: Sequence[Any],
        results: list[Tensor],
        finish: Callable[[], None] | None = None,
        keep: Any = None,
        expected: int | None = None,
    ) -> None:
        """Store MPI's requests and the completion to run after them.

        Args:
            name: Name for error messages.
            requests: MPI requests; the call is done when all have completed.
            results: See the class.
            finish: Called once after all requests have completed.
            keep: Buffers to keep alive until then.
            expected: Bytes that the call's one request must receive; None to accept any number.
        """
        self.name, self.results, self.done = name, results, False
        self.error: BaseException | None = None
        self.source = -1
        self._requests, self._finish, self._keep = list(requests), finish, keep
        self._expected = expected
        self._future: Any = None

    def look(self, mpi: Any) -> bool:
        """Return whether the call is done, completing it if so. Requires the engine's lock."""
        if self.done:
            return True
        try:
            statuses = None if self._expected is None else [mpi.Status()]
            if not mpi.Request.Testall(self._requests, statuses):
                return False
            if statuses is not None:
                self._check_message(mpi, statuses[0])
            if self._finish is not None:
                self._finish()
        except BaseException as error:
            self.error = error
        self.done, self._finish, self._keep = True, None, None
        if self._future is not None:
            self._settle()
        return True

    @classmethod
    def of_several(cls, calls: Sequence[Call]) -> Call:
        """Return one call that is done when all the given calls are."""

        def finish() -> None:
            for call in calls:
                if call._finish is not None:
                    call._finish()

        requests = [request for call in calls for request in call._requests]
        results = [result for call in calls for result in call.results]
        return cls(calls[0].name, requests, results, finish, keep=calls)

    def _check_message(self, mpi: Any, status: Any) -> None:
        came, self.source = status.Get_count(mpi.BYTE), status.Get_source()
        if came != self._expected:
            raise DistBackendError(
                f"a message of {came} bytes from rank {self.source} of the group came where "
                f"{self._expected} were expected: sender and receiver must agree in dtype and size"
            )

    def future(self) -> Any:
        """Return a torch future of the results. Requires the engine's lock."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self.done:
                self._settle()
        return self._future

    def _settle(self) -> None:
        if self.error is None:
            self._future.set_result(self.results)
        else:
            self._future.set_exception(self.error)


class Engine:
    """All MPI calls of this process that are in flight."""

    def __init__(self, mpi: Any) -> None:
        """Store the module `mpi4py.MPI`."""
        self.mpi = mpi
        self.lock = threading.RLock()  # one thread in MPI at a time: MPI may not support more
        self._active: list[Call] = []
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._ending = False
        self._late = False  # whether a call has timed out
        atexit.register(self._end)  # runs before mpi4py's handler, which finalizes MPI

    def start(self, make: Callable[[], Call]) -> Call:
        """Start a call: `make` issues its requests."""
        with self.lock:
            call = make()
            self._active.append(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mpi-progress", daemon=True)
            self._thread.start()
        if not self._wake.is_set():
            self._wake.set()
        return call

    def wait(self, call: Call, seconds: float | None) -> None:
        """Wait until a call is done.

        Raises:
            DistBackendError: It was not done within `seconds`; the group is then unusable.
        """
        for _ in range(_SPINS):
            if self.look(call):
                return
        start = time.monotonic()
        while not self.look(call):
            waited = time.monotonic() - start
            if seconds is not None and waited > seconds:
                self._late = True
                raise DistBackendError(
                    f"{call.name} over MPI did not end within {seconds:g} s: some rank of the "
                    "group has not called it, has ended, or is late"
                )
            time.sleep(0 if waited < _EAGER else _NAP)  # 0 yields to other threads and ranks

    def look(self, call: Call) -> bool:
        """Return whether a call is done, completing it if so."""
        if call.done:
            return True
        with self.lock:
            through = call.look(self.mpi)
            if through and call in self._active:
                self._active.remove(call)
        return through

    def future(self, call: Call) -> Any:
        """Return a torch future of a call's results."""
        with self.lock:
            return call.future()

    def _run(self) -> None:
        idle = 0
        while not self._ending:
            with self.lock:
                for call in list(self._active):  # callbacks of a finished call may start others
                    self.look(call)
                idle = 0 if self._active else idle + 1
                if idle > _IDLE_LOOKS:
                    self._wake.clear()
            if idle > _IDLE_LOOKS:
                self._wake.wait()
                idle = 0
            time.sleep(_NAP)

    def _end(self) -> None:
        """Stop the thread; after a failure abort the job, since MPI would wait for all ranks."""
        self._ending = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
        failed = self._late or getattr(sys, "last_value", None) is not None  # an uncaught exception
        if failed and self.mpi.COMM_WORLD.Get_size() > 1:
            sys.stderr.flush()
            time.sleep(_LAST_WORDS)
            self.mpi.COMM_WORLD.Abort(1)


class MPIWork(c10d.Work):
    """The handle of a call in flight; dropping it does not cancel the call."""

    def __init__(self, engine: Engine, call: Call, seconds: float) -> None:
        """Store the engine, the call, and the default timeout of a wait."""
        super().__init__()
        self._engine, self._call, self._seconds = engine, call, seconds

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is done.

        Raises:
            DistBackendError: The wait timed out, or a message has an unexpected size.
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
        """Return whether the call is done without an error."""
        return self.is_completed() and self._call.error is None

    def exception(self) -> BaseException | None:
        """Return the call's error, or None."""
        return self._call.error

    def result(self) -> list[Tensor]:
        """Return the tensors that hold the result."""
        return self._call.results

    def synchronize(self) -> None:
        """Wait: there are no streams to synchronize."""
        self.wait()

    def get_future(self) -> Any:
        """Return a future of the results."""
        return self._engine.future(self._call)

    def _source_rank(self) -> int:
        """Return the sender of the received message, as a rank of the group."""
        return self._call.source
