"""A process that has the libraries loaded, and forks one that runs tests for each request.

It runs apart (`python nursery.py TREE`, with the tree's sources on PYTHONPATH), answers one JSON line
with another, and has imported nothing of the tree itself: each fork sees the sources as they are
then. The fork-server of ranks comes from a fork too, where it would else load torch anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.nn.attention",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.utils.checkpoint",
    "pytest",
    "_pytest.assertion.rewrite",
    "pytest_timeout",
    "numpy",
    "hypothesis",
    "hypothesis.strategies",
    "safetensors.torch",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.phi3.modeling_phi3",
    "transformers.models.gemma2.modeling_gemma2",
    "mutation.judge",
    "mutation.recorder",
)
_SUBREAPER = 36  # prctl: orphans of forks become children of this process, which ends them
_HIGH = 200  # number for a descriptor that another one's number must not meet


def serve(tree: str) -> None:
    """Answer requests until standard input ends."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    os.chdir(tree)
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready": len(sys.modules)}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run the request in a fork; how it ended, after all its processes have."""
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _become(request)
    waiting = os.pidfd_open(pid)
    ready = select.select([waiting, sys.stdin], [], [], request["limit"])[0]
    os.close(waiting)
    _end_all()
    if sys.stdin in ready:  # nobody asks before the answer: the caller is gone
        os._exit(0)
    return {"ended": bool(ready), "seconds": time.monotonic() - began}


def _end_all() -> None:
    """Kill and reap every process below this one."""
    while True:
        for pid in _below(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _below(root: int) -> list[int]:
    """Process numbers of the children of a process, and of theirs."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, waiting = [], [root]
    while waiting:
        own = children.get(waiting.pop(), [])
        found += own
        waiting += own
    return found


def _become(request: dict[str, Any]) -> None:
    """Run tests in the fork, with its own output; never return."""
    code = 1
    try:
        with open(request["log"], "wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        if "record" in request:
            os.environ["MUTATION_RECORD"] = request["record"]
        recorder, judge = (importlib.import_module(f"mutation.{n}") for n in ("recorder", "judge"))
        recorder.start()
        with contextlib.suppress(ModuleNotFoundError):  # where no test could start ranks
            _warm_ranks()
        code = judge.run(request)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _warm_ranks() -> None:
    """Let the fork-server of ranks begin in a fork of this process, once."""
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
    """Wait for the command that a new interpreter would run, and run it here."""
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
    """A forked process, as far as a user of `subprocess.Popen` asks."""

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


if __name__ == "__main__":
    serve(sys.argv[1])
