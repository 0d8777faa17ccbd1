"""What can be seen of a process from outside, and a number for the machine that it is on."""

from __future__ import annotations

import os
import sys
import traceback


def host_number() -> int:
    """Return a number of this host and boot, in 32 bits; containers of one machine are hosts."""
    from ..dist.building import this_host  # the monitor, which reads this file, has no parent

    return this_host() & 0xFFFFFFFF


def process_state(pid: int) -> str:
    """Return a letter: `T` for a stopped process, `X` for one that is gone, `?` unknown."""
    return process_signs(pid)[0]


def process_signs(pid: int) -> tuple[str, int, float]:
    """Return its state, as above, how often it touched a new page, and its seconds of CPU."""
    if not os.path.isdir("/proc/self"):
        return "?", 0, 0.0
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        state, faults = fields[0].decode(), int(fields[7]) + int(fields[9])
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return "X", 0, 0.0
    return {"t": "T", "Z": "X", "x": "X"}.get(state, state), faults, seconds


def thread_stack(ident: int | None) -> str:
    """Return the innermost of the Python stack of one of this process's threads."""
    frame = sys._current_frames().get(ident or 0)
    return "".join(traceback.format_stack(frame)[-6:]) if frame else ""
