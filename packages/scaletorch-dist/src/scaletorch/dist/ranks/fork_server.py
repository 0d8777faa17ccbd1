"""The fork-server: a single-threaded process that has imported torch and forks ranks.

It runs as a separate process (`serve`), imports shared modules once, and forks one child per
request. Unlike multiprocessing's fork-server it never runs the caller's `__main__`, uses the
caller's `sys.path`, changes no setting of the caller, and ends with all its ranks when the caller
does.

Messages use a multiprocessing connection. A request for a rank is followed by the descriptors of
its connection, stdout and stderr on the same socket. When a rank has ended, its exit code (or minus
the signal) is in the file that its request named.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOAD = ("torch", "torch.distributed")

RankMain = Callable[[int, dict[str, Any]], None]


class _Server:
    """Sockets and children of the running server."""

    def __init__(self, control_fd: int) -> None:
        self.socket = socket.socket(fileno=control_fd)
        self.control: Connection[Any, Any] = Connection(os.dup(control_fd))
        self.exit_files: dict[int, str] = {}  # of the children that run, by pid
        signal.signal(signal.SIGCHLD, lambda *_: self.reap())

    def answer(self, request: dict[str, Any], rank_main: RankMain) -> None:
        sys.path[:] = request["path"]  # the caller's path may have grown
        if "preload" not in request:
            _, fds, _, _ = socket.recv_fds(self.socket, 1, 3)
            self.control.send({"pid": self.fork(fds, request, rank_main)})
            return
        try:
            _preload(request["preload"])
        except Exception:
            self.control.send({"error": traceback.format_exc()})
        else:
            self.control.send({})

    def fork(self, fds: list[int], request: dict[str, Any], rank_main: RankMain) -> int:
        pid = os.fork()
        if pid == 0:
            self._become_rank(fds, request, rank_main)
        for fd in fds:
            os.close(fd)
        self.exit_files[pid] = request["exit_file"]
        self.reap()  # it may have ended before its file was known
        return pid

    def _become_rank(self, fds: list[int], request: dict[str, Any], main: RankMain) -> None:
        """Run the rank in the forked child; never returns to the server's loop."""
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.control.close()
            self.socket.close()
            for number, fd in enumerate(fds[1:], 1):
                os.dup2(fd, number)
                os.close(fd)
            main(fds[0], request)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def reap(self) -> None:
        """Write the exit code of each child that has ended."""
        for pid, file in list(self.exit_files.items()):
            with contextlib.suppress(ChildProcessError):  # a signal in this loop was quicker
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with contextlib.suppress(OSError):  # the folder is gone
                        Path(file).write_text(str(os.waitstatus_to_exitcode(status)))
                    del self.exit_files[pid]


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
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                server.answer(server.control.recv(), rank_main)
    finally:
        for pid in list(server.exit_files):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
