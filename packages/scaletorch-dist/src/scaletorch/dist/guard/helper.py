"""Starting the monitor's process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from typing import IO, Any, cast

# Without this package's own `__init__`, which has torch: in a tenth of a second.
_BOOT = (
    "import importlib, sys, types\n"
    "package = types.ModuleType({package!r})\n"
    "package.__path__ = [{folder!r}]\n"
    "sys.modules[{package!r}] = package\n"
    "importlib.import_module({package!r} + '.monitor').serve()\n"
)


def start_monitor(listener: socket.socket, agreed: dict[str, Any]) -> None:
    """Start the monitor in a process that has this one's listener, and nothing else of it.

    It ends when all ranks have hung up, and does not mind Ctrl-C.

    Args:
        listener: where ranks connect; closed here.
        agreed: the other arguments of `Monitor`.

    Raises:
        OSError: there is no interpreter to start.
    """
    boot = _BOOT.format(package=__package__, folder=os.path.dirname(os.path.abspath(__file__)))
    with listener:
        process = subprocess.Popen(
            [sys.executable, "-S", "-P", "-c", boot],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # who reads a rank's output does not wait for this process
            stderr=subprocess.DEVNULL,
            pass_fds=(listener.fileno(),),
            cwd="/",
            start_new_session=True,
        )
        with cast(
            IO[bytes], process.stdin
        ) as words:  # not in the arguments, which other users can read
            words.write(json.dumps({**agreed, "listener": listener.fileno()}).encode())
    threading.Thread(target=process.wait, name="scaletorch-guard-reaper", daemon=True).start()
