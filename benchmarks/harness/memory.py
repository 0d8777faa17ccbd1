"""How much memory this process has."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(kind: str = "RSS") -> int:
    """Return the bytes of memory that this process has, or had at most (`HWM`)."""
    found = re.search(rf"Vm{kind}:\s+(\d+) kB", STATUS.read_text())
    if not found:
        raise SystemExit(f"{STATUS} does not tell Vm{kind}: memory needs Linux")
    return int(found[1]) * 1024


def forget_peak() -> int:
    """Give free memory back, let peaks begin anew, and return what this process has now."""
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR.write_text("5")
    return resident()
