"""Name a call's group and source line; compare calls with those of other ranks of the host."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
from types import FrameType
from zlib import crc32

from torch.distributed import ProcessGroup

from ..dist.building import this_host
from ..dist.errors import StateError

_PACKAGE = __name__.rpartition(".guard.")[0] + "."  # this library, also in a vendored copy
_SKIPPED = (_PACKAGE, "torch.", "contextlib", "functools")
_PLACES = 1 << 16


def group_label(group: ProcessGroup) -> str:
    """Return a readable name for a group, such as `tp` for the description `scaletorch_tp`."""
    name = (group.group_desc or "").removeprefix("scaletorch_")
    if name in ("", "undefined"):
        name = f"group {group.group_name}"
    return "the default group" if name == "default_pg" else name


def call_site() -> tuple[str, int]:
    """Return the first frame outside this library, `file.py:33 in function`, and its checksum."""
    frame: FrameType = sys._getframe(3)  # the caller of the recorder
    while True:
        inside = frame.f_globals.get("__name__", "").startswith(_SKIPPED)
        outer = frame.f_back
        if not inside or outer is None:
            break
        frame = outer
    file = "/".join(frame.f_code.co_filename.rsplit("/", 2)[-2:])[-40:]
    place = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
    text = place.encode(errors="backslashreplace")[:72]  # not all file names are UTF-8
    return text.decode(errors="replace"), crc32(text)


class Board:
    """A table on which each rank of this host posts its calls.

    Gloo aborts a process that receives more bytes than it expects, before the guard could report
    it. So the first rank that reaches a call posts it; the next ranks compare theirs with it and
    wait for the verdict if they differ. That costs half a microsecond. It misses ranks of other
    hosts, and two ranks that post at the same instant. A file in the temporary folder, with a name
    that cannot be guessed, holds the table until `unlink`.
    """

    def __init__(self, name: str) -> None:
        self._path = os.path.join(tempfile.gettempdir(), f"{name}-{this_host():016x}")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self._path, flags, 0o600)
        try:
            if os.fstat(file).st_uid != os.getuid():  # its name may have been seen on another host
                raise StateError(f"{self._path} belongs to another user")
            os.ftruncate(file, 8 * _PLACES)
            if hasattr(os, "posix_fallocate"):  # a full disk raises here instead of SIGBUS later
                os.posix_fallocate(file, 0, 8 * _PLACES)
            self._map = mmap.mmap(file, 8 * _PLACES)
        finally:
            os.close(file)
        self._words = memoryview(self._map).cast("Q")

    def differs(self, channel: int, seq: int, check: int) -> bool:
        """Post a call's checksum; return whether another rank has posted a different one."""
        number = channel + seq
        place, tag = number % _PLACES, number >> 16 & 0xFFFFFFFF
        seen = self._words[place]
        if seen >> 32 == tag:
            return seen != tag << 32 | check
        self._words[place] = tag << 32 | check  # an atomic write
        return False

    def unlink(self) -> None:
        """Remove the file, once all ranks have mapped it."""
        with contextlib.suppress(OSError):  # another rank has removed it
            os.unlink(self._path)

    def close(self) -> None:
        """Release the memory; other ranks keep their mapping."""
        self.unlink()
        self._words.release()
        self._map.close()
