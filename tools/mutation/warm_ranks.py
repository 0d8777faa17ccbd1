"""Start the ranks' fork server in a fork of a process with torch, not in a new interpreter."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from types import SimpleNamespace
from typing import Any

_HIGH = 200  # lowest descriptor number for moves, above all numbers in use


def prepare() -> None:
    """Let the ranks' fork server start in a fork of this process, once."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_server(theirs)
    theirs.close()
    idle = [pid]

    def start(command: list[str], **options: Any) -> Any:
        if not idle or command[1] != "-c":
            return subprocess.Popen(command, **options)
        message = json.dumps([command, options["env"], list(options["pass_fds"])]).encode()
        socket.send_fds(ours, [message], list(options["pass_fds"]))
        ours.close()
        return Forked(idle.pop())

    module = importlib.import_module("scaletorch.dist.ranks.process")
    module.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": start})  # type: ignore[attr-defined]


def _become_server(channel: socket.socket) -> None:
    """Wait for the command of the new interpreter, and run it here."""
    try:
        own = socket.socket(fileno=fcntl.fcntl(channel.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH))
        channel.close()
        message, fds, _, _ = socket.recv_fds(own, 1 << 20, 8)
        if message:
            command, environment, numbers = json.loads(message)
            high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for fd in fds]
            for fd in fds:
                os.close(fd)
            for fd, number in zip(high, numbers, strict=True):
                os.dup2(fd, number)
                os.close(fd)
            os.setsid()
            os.environ.clear()
            os.environ.update(environment)
            sys.argv[:] = command[2:]
            sys.argv[0] = "-c"
            exec(command[2], {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


class Forked:
    """A forked process with the methods of `subprocess.Popen` that its user calls."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        deadline = time.monotonic() + (timeout or 1e9)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork-server", timeout or 0)
            time.sleep(0.01)
        return self.returncode or 0
