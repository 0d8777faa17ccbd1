"""The caller's side of ranks: start the fork-server, fork ranks from it, collect their answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ..errors import RankFailedError, StateError
from ..members import name_ranks
from . import fork_server

START_TIMEOUT = 300.0  # seconds; importing torch is slow on a cold disk or a busy machine
_BOOT = (
    "import sys, json, importlib\n"
    "package, fd, sys.path[:] = json.loads(sys.argv[1])\n"
    "importlib.import_module(package + '.fork_server').serve(fd, package)\n"
)
FAILURE_GRACE = 2.0  # seconds that other ranks get to finish or fail after the first failure
STACK_WAIT = 0.5  # seconds to wait for the stacks of ranks that hang
_CHILD = os.path.join(os.path.dirname(__file__), "child.py")
Answer = tuple[str, Any, Any]  # a message from `child`: its kind and two values
# The coordinates of a rank in messages, on a grid and for experts.
_COORDINATES = re.compile(r"(\brank \d+ \()?\bdp\d+ pp\d+ cp\d+ tp\d+\b(?: edp\d+ ep\d+ etp\d+\b)?")


@dataclass(eq=False, slots=True)
class RankProcess:
    """One forked rank: a connection for messages, and a pipe for its exit status."""

    pid: int
    connection: Connection[Any, Any]
    status_fd: int
    stack_file: str
    exit_code: int | None = None
    ended: bool = False

    def send(self, message: bytes) -> None:
        """Send a pickled message; ignore a dead process, whose exit status shows how it died."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(message)

    def read_status(self) -> None:
        """Read the exit code from a status pipe that is ready."""
        if self.ended:
            return
        data = os.read(self.status_fd, fork_server.EXIT_STATUS.size)
        if data:  # empty if the server itself has ended
            (self.exit_code,) = fork_server.EXIT_STATUS.unpack(data)
        self.ended = True

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def release(self) -> None:
        """Close this side's descriptors."""
        self.connection.close()
        if self.status_fd >= 0:
            os.close(self.status_fd)
            self.status_fd = -1
        self.ended = True


class ForkServer:
    """The fork-server of this process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        argument = json.dumps([__package__, theirs.fileno(), sys.path])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, argument],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C reaches only the caller, which ends the ranks
            )
        self._socket = ours
        self._control: Connection[Any, Any] = Connection(os.dup(ours.fileno()))
        weakref.finalize(self, _end_server, self.owner, ours, self._process)
        self.directory: str = self._receive()["directory"]

    @property
    def usable(self) -> bool:
        """True if the server runs and was started by this process, not by its parent."""
        return self.owner == os.getpid() and self._process.poll() is None

    def _receive(self) -> dict[str, Any]:
        try:
            if not self._control.poll(START_TIMEOUT):
                raise TimeoutError(f"no answer in {START_TIMEOUT:g} s")
            message: dict[str, Any] = self._control.recv()
        except (OSError, EOFError) as error:
            raise StateError(
                f"the fork-server for ranks did not start or died ({error!r}); "
                "its own error is on stderr"
            ) from error
        if "error" in message:
            raise StateError(f"the fork-server could not import a module:\n{message['error']}")
        return message

    def preload(self, modules: Iterable[str]) -> None:
        """Import modules in the server by this process's `sys.path`, for ranks forked later."""
        with self._lock:
            self._control.send({"preload": list(modules), "path": sys.path})
            self._receive()

    def spawn(self, request: dict[str, Any]) -> RankProcess:
        """Fork a rank that runs `child.main` with a request."""
        ours, theirs = Pipe()
        status_read, status_write = os.pipe()
        try:
            fds = (theirs.fileno(), status_write, 1, 2)
            with self._lock:
                self._control.send(request)
                socket.send_fds(self._socket, [b"."], fds)
                pid = self._receive()["pid"]
        except BaseException:
            ours.close()
            os.close(status_read)
            raise
        finally:
            theirs.close()
            os.close(status_write)
        return RankProcess(pid, ours, status_read, request["stack_file"])


def _end_server(owner: int, control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Close the socket, upon which the server ends its ranks, removes its files and exits."""
    if owner == os.getpid():
        with contextlib.suppress(OSError):  # the server has already exited
            control.shutdown(socket.SHUT_RDWR)
        control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)


_server: ForkServer | None = None
_server_lock = threading.Lock()


def get_server() -> ForkServer:
    """Return the fork-server of this process; the first call starts it (some seconds)."""
    global _server
    with _server_lock:
        if _server is None or not _server.usable:
            _server = ForkServer()
        return _server


def stop(processes: Iterable[RankProcess], grace: float) -> None:
    """Wait `grace` seconds for processes to exit, then kill them."""
    processes = list(processes)
    deadline = time.monotonic() + grace
    for signal_number, until in ((None, deadline), (signal.SIGKILL, deadline + 10)):
        for process in processes:
            if signal_number is not None:
                process.signal(signal_number)
        while alive := {p.status_fd: p for p in processes if not p.ended}:
            ready = wait(list(alive), max(0.0, until - time.monotonic()))
            for fd in ready:
                alive[fd].read_status()  # type: ignore[index]
            if not ready:
                break
    for process in processes:
        process.release()


@dataclass(slots=True)
class RankReport:
    """The outcome of each rank in one run."""

    name: str
    world_size: int
    results: dict[int, object] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)  # in the order of arrival
    exceptions: dict[int, BaseException] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)  # stack traces of unfinished ranks

    @property
    def pending(self) -> list[int]:
        """Ranks without an outcome so far."""
        return sorted(set(range(self.world_size)) - {*self.results, *self.failures})

    def died(self, rank: int, exit_code: int | None, stacks: str) -> None:
        """Record a rank whose process ended without an answer, with its threads' stacks."""
        how = f"rank {rank} {describe_exit(exit_code)} before it returned\n"
        self.failures[rank] = f"{how}{stacks}\n" if stacks else how

    def error(self, timeout: float | None, timed_out: bool) -> RankFailedError:
        """Return one error with all failures, in order of arrival, and all stacks."""
        hung = tuple(rank for rank in self.stacks if rank not in self.failures)
        lines = [self._headline(hung, timeout, timed_out)]
        alike: dict[str, tuple[list[int], str]] = {}  # failures that differ only in coordinates
        for rank, text in self.failures.items():
            alike.setdefault(without_coordinates(text), ([], text))[0].append(rank)
        for ranks, text in alike.values():
            lines.append(f"\n--- {name_ranks(sorted(ranks))} failed ---\n{text.rstrip()}")
        for rank in hung:
            lines.append(f"\n--- rank {rank} was still at ---\n{self.stacks[rank].rstrip()}")
        return RankFailedError(
            "\n".join(lines),
            failures=dict(self.failures),
            exceptions=dict(self.exceptions),
            finished=tuple(sorted(self.results)),
            hung=hung,
        )

    def _headline(self, hung: tuple[int, ...], timeout: float | None, timed_out: bool) -> str:
        phrases = []
        if self.failures:
            phrases.append(f"{name_ranks(list(self.failures))} failed")
        if hung:
            verb = "was" if len(hung) == 1 else "were"
            why = f"had not finished after {timeout:g} s" if timed_out else f"{verb} left waiting"
            phrases.append(f"{name_ranks(list(hung))} {why}")
        if self.results:
            phrases.append(f"{name_ranks(sorted(self.results))} finished")
        return f"{self.name} on {self.world_size} ranks: " + "; ".join(phrases)


def without_coordinates(text: str) -> str:
    """Return a message without the grid coordinates of its rank."""
    return _COORDINATES.sub("", text)


def describe_exit(exit_code: int | None) -> str:
    """Describe how a process ended."""
    if exit_code is None:
        return "ended with the fork-server"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def collect(
    processes: Sequence[RankProcess], report: RankReport, timeout: float | None
) -> dict[int, Answer]:
    """Collect every rank's answer and fill the report; after an error, kill the processes."""
    __tracebackhide__ = True
    answers: dict[int, Answer] = {}
    deadline = None if timeout is None else time.monotonic() + timeout
    grace: float | None = None
    while report.pending:
        if report.failures and grace is None:
            grace = time.monotonic() + FAILURE_GRACE
        limits = [limit for limit in (deadline, grace) if limit is not None]
        remaining = min(limits) - time.monotonic() if limits else None
        if remaining is not None and remaining <= 0:
            break
        for rank in _ready_ranks(processes, report.pending, remaining):
            answer = _receive(processes[rank])
            if answer is None:
                report.died(rank, processes[rank].exit_code, _last_stacks(processes[rank]))
            else:
                answers[rank] = answer
                _record(rank, answer, report)
    if report.failures or report.pending:
        _take_stacks(processes, report)
        raise report.error(timeout, timed_out=grace is None)
    return answers


def _ready_ranks(
    processes: Sequence[RankProcess], pending: list[int], remaining: float | None
) -> list[int]:
    sources: dict[Any, int] = {}
    for rank in pending:
        sources[processes[rank].connection] = rank
        sources[processes[rank].status_fd] = rank
    return sorted({sources[source] for source in wait(list(sources), remaining)})


def _receive(process: RankProcess) -> Answer | None:
    """Return the answer of a ready process, or None if it has died."""
    with contextlib.suppress(EOFError, OSError):
        if process.connection.poll():
            answer: Answer = process.connection.recv()
            return answer
    wait([process.status_fd], 5.0)  # the server sends the exit status a moment later
    process.read_status()
    return None


def _record(rank: int, answer: Answer, report: RankReport) -> None:
    kind, first, second = answer
    if kind == "failed":
        report.failures[rank] = first
        if second is not None:
            report.exceptions[rank] = ForkingPickler.loads(second)
        return
    try:
        report.results[rank] = None if first is None else ForkingPickler.loads(first)
    except Exception as error:
        report.failures[rank] = f"its result cannot be unpickled here: {error!r}\n"


def _take_stacks(processes: Sequence[RankProcess], report: RankReport) -> None:
    """Make each unfinished rank write its stack, even if it is blocked in C++."""
    pending = report.pending
    for rank in pending:
        processes[rank].signal(signal.SIGUSR1)
    deadline = time.monotonic() + STACK_WAIT
    for rank in pending:
        text = ""
        while not text.endswith("\n") and time.monotonic() < deadline:
            time.sleep(0.01)
            with open(processes[rank].stack_file) as file:
                text = file.read()
        report.stacks[rank] = _own_frames(text) or "(no stack: it did not answer a signal)"


def _last_stacks(process: RankProcess) -> str:
    """Return the stacks that a rank wrote when a signal such as SIGSEGV killed it."""
    with contextlib.suppress(OSError), open(process.stack_file) as file:
        return _own_frames(file.read().partition("\nExtension modules:")[0]).strip()
    return ""


def _own_frames(stacks: str) -> str:
    """Return the stacks without the frames that called the rank's function."""
    hidden = False
    lines = []
    for line in stacks.splitlines():
        hidden = line.startswith("  ") and (hidden or _CHILD in line)
        if not hidden:
            lines.append(line)
    return "\n".join(lines)
