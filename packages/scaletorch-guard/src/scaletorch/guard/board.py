"""The last calls of this host's ranks, in memory that they share."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import tempfile

from ..dist.building import this_host
from ..dist.errors import StateError

_PLACES = 1 << 16
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


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
        file = os.open(self._path, _FLAGS, 0o600)
        try:
            if os.fstat(file).st_uid != os.getuid():
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


def channel_number(key: str) -> int:
    """Return a 48-bit hash of a channel's key."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "little")
