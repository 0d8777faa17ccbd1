"""Calls of MPI under way, and who moves them on: whoever waits, and one thread beside.

MPI moves non-blocking calls only while some thread is inside MPI. So a thread looks after them
while there are any; it sleeps when there have been none for a while, and ends before MPI does.
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

_NAP = 1e-4  # s between looks of the thread
_LAST_WORDS = 1.0  # s before all ranks end: what mpirun has not read of them by then is lost
_IDLE_LOOKS = 1000  # looks without work before the thread sleeps
_SPINS = 100  # looks of a waiting call before it gives way: small messages are there by then
_EAGER = 0.05  # s for which a waiting call looks again and again: large messages go in many pieces


class Call:
    """One non-blocking call.

    Attributes:
        name: For messages.
        results: The tensors that hold the result.
        done: Finished, well or badly.
        error: Why it failed.
        source: Rank a message came from.
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
        """Take MPI's requests and what remains to do after them.

        Args:
            name: For messages.
            requests: MPI's; all are to end.
            results: See the class.
            finish: Run once all requests have ended.
            keep: Memory that must live as long.
            expected: Bytes that the one request is to receive.
        """
        self.name, self.results, self.done = name, results, False
        self.error: BaseException | None = None
        self.source = -1
        self._requests, self._finish, self._keep = list(requests), finish, keep
        self._expected = expected
        self._future: Any = None

    def look(self, mpi: Any) -> bool:
        """See whether it is through, and finish it then; the engine's lock is held."""
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
        """Return one call that ends when all of these have ended."""

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
        """Return a torch future of the results; the engine's lock is held."""
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
    """All calls of this process under way."""

    def __init__(self, mpi: Any) -> None:
        """Take `mpi4py.MPI`."""
        self.mpi = mpi
        self.lock = threading.RLock()  # one thread in MPI at a time: no more may be allowed
        self._active: list[Call] = []
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._ending = False
        self._late = False  # a call did not end in time, and never may
        atexit.register(self._end)  # runs before mpi4py's, which finalises MPI

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
        """Wait until a call is through.

        Raises:
            DistBackendError: Not within so many seconds; the group is of no use then.
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
            time.sleep(0 if waited < _EAGER else _NAP)  # 0 gives way to other threads and ranks

    def look(self, call: Call) -> bool:
        """See whether a call is through, and finish it then."""
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
                for call in list(self._active):  # a finished one's callbacks may start others
                    self.look(call)
                idle = 0 if self._active else idle + 1
                if idle > _IDLE_LOOKS:
                    self._wake.clear()
            if idle > _IDLE_LOOKS:
                self._wake.wait()
                idle = 0
            time.sleep(_NAP)

    def _end(self) -> None:
        """Stop the thread; after a failure end the whole job, or MPI would wait for its ranks."""
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
