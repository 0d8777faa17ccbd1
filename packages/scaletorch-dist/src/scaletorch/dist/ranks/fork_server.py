"""The fork-server: a single-threaded process that has imported torch and forks ranks.

It runs as a separate process (`serve`), imports shared modules once, and forks one child per
request. Unlike multiprocessing's fork-server it never runs the caller's `__main__`, uses the
caller's `sys.path`, changes no setting of the caller, and ends with all its ranks when the caller
does.

Messages use a multiprocessing connection. A request for a rank is followed by the descriptors of
`RANK_FDS` on the same socket.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

PRELOAD = ("torch", "torch.distributed")
RANK_FDS = ("connection", "status", "stdout", "stderr")
EXIT_STATUS = struct.Struct("<i")  # content of a status pipe: the exit code, or minus the signal

RankMain = Callable[[int, dict[str, Any]], None]


class _Server:
    """Sockets and children of the running server."""

    def __init__(self, control_fd: int) -> None:
        self.socket = socket.socket(fileno=control_fd)
        self.control: Connection[Any, Any] = Connection(os.dup(control_fd))
        self.status_fds: dict[int, int] = {}  # pid → write end of its status pipe
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_write, False)
        signal.set_wakeup_fd(self.wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up byte needs a handler

    def run(self, rank_main: RankMain) -> None:
        while True:
            ready, _, _ = select.select([self.control.fileno(), self.wake_read], [], [])
            if self.wake_read in ready:
                os.read(self.wake_read, 4096)
                self.reap()
            if self.control.fileno() in ready:
                try:
                    self.answer(self.control.recv(), rank_main)
                except (EOFError, ConnectionError):
                    return

    def answer(self, request: dict[str, Any], rank_main: RankMain) -> None:
        sys.path[:] = request["path"]  # the caller's path may have grown
        if "preload" not in request:
            _, fds, _, _ = socket.recv_fds(self.socket, 1, len(RANK_FDS))
            pid = self.fork(dict(zip(RANK_FDS, fds, strict=True)), request, rank_main)
            self.control.send({"pid": pid})
            return
        try:
            _preload(request["preload"])
        except Exception:
            self.control.send({"error": traceback.format_exc()})
        else:
            self.control.send({})

    def fork(self, fds: dict[str, int], request: dict[str, Any], rank_main: RankMain) -> int:
        pid = os.fork()
        if pid == 0:
            self._become_rank(fds, request, rank_main)
        self.status_fds[pid] = fds.pop("status")
        for fd in fds.values():
            os.close(fd)
        return pid

    def _become_rank(self, fds: dict[str, int], request: dict[str, Any], main: RankMain) -> None:
        """Run the rank in the forked child; never returns to the server's loop."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.control.close()
            self.socket.close()
            for fd in (self.wake_read, self.wake_write, fds["status"], *self.status_fds.values()):
                os.close(fd)
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(fds[name], number)
                os.close(fds[name])
            main(fds["connection"], request)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def reap(self) -> None:
        """Send the caller the exit status of each child that has ended."""
        while self.status_fds:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            fd = self.status_fds.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(fd, EXIT_STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(fd)


def _preload(modules: Iterable[str]) -> None:
    """Import modules, then freeze the garbage collector so that forks keep sharing their memory."""
    missing = [module for module in modules if module not in sys.modules]
    for module in missing:
        importlib.import_module(module)
    if missing:
        gc.collect()
        gc.freeze()


def serve(control_fd: int, package: str) -> None:
    """Serve requests until the caller closes the socket; ranks run `child.main` of `package`."""
    server = _Server(control_fd)
    directory = tempfile.mkdtemp(prefix="scaletorch-ranks-")
    try:
        child, names = f"{package}.child", f"{package.rpartition('.')[0]}.public"
        _preload((*PRELOAD, child, names))
        rank_main: RankMain = sys.modules[child].main
        server.control.send({"directory": directory})
        server.run(rank_main)
    finally:
        for pid in server.status_fds:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
