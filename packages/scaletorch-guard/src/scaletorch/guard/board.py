"""The board: memory that the ranks of one host share, to see a call that differs before it is made.

Gloo aborts a process that receives more bytes than it expects, before anybody could tell of it. So
the second rank that comes to a call compares it with the call that the first one has posted here,
and waits for the verdict if they differ. That costs half a microsecond; ranks of other hosts are
not seen, nor is one that posts in the same instant.
"""

from __future__ import annotations

import contextlib
import hashlib
import os

from .ledger import map_file
from .processes import host_number

PREFIX = "board-"
_PLACES = 1 << 16


class Board:
    """The calls that this host's ranks have posted last.

    Args:
        folder: Where the ledgers are; the board's file is there until all ranks have left.
    """

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, f"{PREFIX}{host_number():08x}")
        self._map = map_file(self._path, 8 * _PLACES)
        self._words = memoryview(self._map).cast("Q")

    def differs(self, channel: int, seq: int, check: int) -> bool:
        """Post a call; return whether another rank has posted a different one in its place.

        Args:
            channel: The `channel_number` of its channel.
            seq: The call's number in it.
            check: Checksum of 32 bits of all that must be the same on its members.
        """
        number = channel + seq
        place, tag = number % _PLACES, number >> 16 & 0xFFFFFFFF
        seen = self._words[place]
        if seen >> 32 == tag:
            return seen != tag << 32 | check
        self._words[place] = tag << 32 | check  # one store writes it whole
        return False

    def close(self) -> None:
        """Close it, and remove its file; the others keep the memory that they share."""
        self._words.release()
        self._map.close()
        with contextlib.suppress(OSError):  # another rank has removed it
            os.unlink(self._path)


def channel_number(key: str) -> int:
    """Return 48 bits that differ from one channel to another."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "little")
