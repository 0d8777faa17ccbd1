"""The caller's side of the fork-server: start the server once, and fork ranks from it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from ..errors import StateError
from . import fork_server

START_TIMEOUT = 300.0  # seconds; importing torch is slow on a cold disk or a busy machine
_BOOT = (
    "import sys, json, importlib\n"
    "package, fd, sys.path[:] = json.loads(sys.argv[1])\n"
    "importlib.import_module(package + '.fork_server').serve(fd, package)\n"
)


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
