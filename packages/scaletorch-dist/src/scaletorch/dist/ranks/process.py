"""The caller's side of ranks: start the fork-server, fork ranks from it, collect their answers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from ..errors import RankFailedError, StateError
from ..members import name_ranks

START_TIMEOUT = 300.0  # seconds; importing torch is slow on a cold disk or a busy machine
_BOOT = (
    "import sys, json, importlib\n"
    "package, fd, sys.path[:] = json.loads(sys.argv[1])\n"
    "importlib.import_module(package + '.fork_server').serve(fd, package)\n"
)
FAILURE_GRACE = 2.0  # seconds that other ranks get to finish or fail after the first failure
STACK_WAIT = 0.5  # seconds to wait for the stacks of ranks that hang
_LOOK = 0.2  # seconds between looks whether a silent rank has ended
_SERVER = os.path.join(os.path.dirname(__file__), "fork_server.py")
# The coordinates of a rank in messages, on a grid and for experts.
_COORDINATES = re.compile(r"(\brank \d+ \()?\bdp\d+ pp\d+ cp\d+ tp\d+\b(?: edp\d+ ep\d+ etp\d+\b)?")


@dataclass(eq=False, slots=True)
class RankProcess:
    """One forked rank: its connection, the pipe of its exit code, and the file of its stacks."""

    pid: int
    connection: Connection[Any, Any]
    exits: Connection[Any, Any]  # gets one number
    server: ForkServer
    stack_file: str
    exit_code: int | None = None  # minus a signal; None as long as it runs, or without the server

    def send(self, message: bytes) -> None:
        """Send a pickled message; ignore a dead process, whose exit code shows how it died."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(message)

    def ended(self) -> bool:
        """Return whether the process has ended, also with the server."""
        with contextlib.suppress(EOFError, OSError):  # the server has ended, or the pool is closed
            if self.exit_code is None and self.exits.poll():
                self.exit_code = self.exits.recv()
        return self.exit_code is not None or not self.server.usable

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if not self.ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


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
        """Fork a rank that runs `fork_server.main` with a request."""
        (ours, theirs), (exits, exits_end) = Pipe(), Pipe(duplex=False)
        try:
            with self._lock, theirs, exits_end:
                self._control.send(request)
                fds = theirs.fileno(), exits_end.fileno(), 1, 2
                socket.send_fds(self._socket, [b"."], fds)
                pid = self._receive()["pid"]
        except BaseException:
            ours.close()
            exits.close()
            raise
        return RankProcess(pid, ours, exits, self, request["stack_file"])


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


def stop(processes: Sequence[RankProcess], grace: float) -> None:
    """Wait `grace` seconds for processes to exit, then kill them."""

    def ended() -> bool:
        return all(process.ended() for process in processes)

    if not _poll(ended, grace):
        for process in processes:
            process.signal(signal.SIGKILL)
        _poll(ended, 10)
    for process in processes:
        process.connection.close()
        process.exits.close()


def _poll(ready: Callable[[], bool], seconds: float) -> bool:
    """Wait until something is ready; return whether it is."""
    deadline = time.monotonic() + seconds
    while not (found := ready()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


@dataclass(slots=True)
class _Outcome:
    """Answers and failures of the ranks in one run."""

    name: str
    processes: Sequence[RankProcess]
    answers: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)  # in the order of arrival
    exceptions: dict[int, BaseException] = field(default_factory=dict)

    def pending(self) -> list[int]:
        known = {*self.answers, *self.failures}
        return [rank for rank in range(len(self.processes)) if rank not in known]

    def record(self, rank: int) -> None:
        """Record the answer of a rank that has sent one or has ended."""
        process, answer = self.processes[rank], None
        with contextlib.suppress(EOFError, OSError):
            if process.connection.poll():
                answer = process.connection.recv()
        if answer is None:
            _poll(process.ended, 5)  # the server sends the exit code a moment later
            how = f"rank {rank} {describe_exit(process.exit_code)} before it returned"
            self.failures[rank] = f"{how}\n{_last_stacks(process)}"
            return
        kind, first, second = answer
        if kind == "failed":
            self.failures[rank] = first
            if second is not None:
                self.exceptions[rank] = ForkingPickler.loads(second)
            return
        try:
            self.answers[rank] = ForkingPickler.loads(first), second
        except Exception as error:
            self.failures[rank] = f"its result cannot be unpickled here: {error!r}"

    def error(self, hung: dict[int, str], why: str) -> RankFailedError:
        """Return one error with all failures, in order of arrival, and the stacks of hung ranks."""
        phrases = []
        if self.failures:
            phrases.append(f"{name_ranks(list(self.failures))} failed")
        if hung:
            phrases.append(f"{name_ranks(list(hung))} {why}")
        if self.answers:
            phrases.append(f"{name_ranks(sorted(self.answers))} finished")
        lines = [f"{self.name} on {len(self.processes)} ranks: {'; '.join(phrases)}"]
        alike: dict[str, list[int]] = {}  # failures that differ only in coordinates
        for rank, text in self.failures.items():
            alike.setdefault(without_coordinates(text), []).append(rank)
        for ranks in alike.values():
            text = self.failures[ranks[0]].rstrip()
            lines.append(f"\n--- {name_ranks(sorted(ranks))} failed ---\n{text}")
        for rank, text in hung.items():
            lines.append(f"\n--- rank {rank} was still at ---\n{text.rstrip()}")
        return RankFailedError(
            "\n".join(lines),
            failures=self.failures,
            exceptions=self.exceptions,
            finished=tuple(sorted(self.answers)),
            hung=tuple(hung),
        )


def without_coordinates(text: str) -> str:
    """Return a message without the grid coordinates of its rank."""
    return _COORDINATES.sub("", text)


def describe_exit(exit_code: int | None) -> str:
    """Describe how a process ended."""
    if exit_code is None:
        return "ended with the fork-server"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}"


def collect(
    processes: Sequence[RankProcess], name: str, timeout: float | None
) -> list[tuple[Any, Any]]:
    """Return every rank's answer to `name`: its result, and what the rank sends beside it.

    Raises:
        RankFailedError: A rank failed, died or did not answer in time; the others may still run.
    """
    __tracebackhide__ = True
    outcome = _Outcome(name, processes)
    end = math.inf if timeout is None else time.monotonic() + timeout
    while (pending := outcome.pending()) and (left := end - time.monotonic()) > 0:
        ready = wait([processes[rank].connection for rank in pending], min(left, _LOOK))
        failed = bool(outcome.failures)
        for rank in pending:
            if processes[rank].connection in ready or processes[rank].ended():
                outcome.record(rank)
        if outcome.failures and not failed:
            end = min(end, time.monotonic() + FAILURE_GRACE)
    if not outcome.failures and not pending:
        return [outcome.answers[rank] for rank in range(len(processes))]
    why = f"{'was' if len(pending) == 1 else 'were'} left waiting"
    if not outcome.failures:
        why = f"had not finished after {timeout:g} s"
    raise outcome.error(_take_stacks(processes, pending), why)


def _take_stacks(processes: Sequence[RankProcess], pending: list[int]) -> dict[int, str]:
    """Make each unfinished rank write its stack, even if it is blocked in C++."""
    for rank in pending:
        processes[rank].signal(signal.SIGUSR1)
    files = {rank: Path(processes[rank].stack_file) for rank in pending}
    _poll(lambda: all(file.read_text().endswith("\n") for file in files.values()), STACK_WAIT)
    silent = "(no stack: it did not answer a signal)"
    return {rank: _own_frames(file.read_text()) or silent for rank, file in files.items()}


def _last_stacks(process: RankProcess) -> str:
    """Return the stacks that a rank wrote when a signal such as SIGSEGV killed it."""
    with contextlib.suppress(OSError):
        text = Path(process.stack_file).read_text()
        return _own_frames(text.partition("\nExtension modules:")[0]).strip()
    return ""


def _own_frames(stacks: str) -> str:
    """Return the stacks without the frames that called the rank's function."""
    hidden = False
    lines = []
    for line in stacks.splitlines():
        hidden = line.startswith("  ") and (hidden or _SERVER in line)
        if not hidden:
            lines.append(line)
    return "\n".join(lines)
