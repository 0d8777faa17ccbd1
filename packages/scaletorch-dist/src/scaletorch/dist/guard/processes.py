"""What this machine knows of a process, and what names the machine."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from zlib import crc32

_BOOT = "/proc/sys/kernel/random/boot_id"


def host_number() -> int:
    """Return a number of this host and boot; containers of one machine count as hosts."""
    boot = ""
    if os.path.exists(_BOOT):
        with open(_BOOT, encoding="ascii") as file:
            boot = file.read()
    space = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
    return crc32(f"{socket.gethostname()} {boot} {space}".encode())


def process_state(pid: int) -> str:
    """Return a letter: ``T`` for a stopped process, ``X`` for one that is gone, ``?`` unknown."""
    if not os.path.isdir("/proc/self"):
        return "?"
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return "X"
    return {"t": "T", "Z": "X", "x": "X"}.get(state, state)


def thread_stack(ident: int | None, limit: int = 6) -> str:
    """Return the Python stack of one of this process's threads."""
    frame = sys._current_frames().get(ident or 0)
    return "".join(traceback.format_stack(frame)[-limit:]) if frame else ""
