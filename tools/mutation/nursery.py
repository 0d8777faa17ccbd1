"""A process with libraries loaded that forks a process to run the tests of each request.

It runs separately (`python -m mutation.nursery TREE MODULES`, with the tree's sources on
PYTHONPATH), and answers one JSON line with another. It imports nothing of the tree itself, so each
fork sees the sources as they are then.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import judge, recorder, warm_ranks

_SUBREAPER = 36  # prctl: orphans of forks become children of this process, which kills them


def serve(tree: str, modules: Iterable[str]) -> None:
    """Import the modules that exist, then answer requests until standard input ends."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    os.chdir(tree)
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready": len(sys.modules)}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run the request in a fork; return how it ended, after all its processes have ended."""
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _become(request)
    waiting = os.pidfd_open(pid)
    ready = select.select([waiting, sys.stdin], [], [], request["limit"])[0]
    os.close(waiting)
    _end_all()
    if sys.stdin in ready:  # a caller sends nothing before the answer, so it is gone
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
    """Return the process ids of all descendants of a process."""
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
        recorder.start()
        with contextlib.suppress(ModuleNotFoundError):  # then no test can start ranks
            warm_ranks.prepare()
        code = judge.run(request)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
