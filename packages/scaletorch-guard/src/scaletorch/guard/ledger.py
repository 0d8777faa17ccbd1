"""A rank's ledger: its last calls, in a file that outlives the process.

Entries are records of fixed size in a ring, written through a memory map, so others can read the
last calls of a killed or aborted rank. Channels, of which there are few, are lines of JSON in a
second file next to it.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import mmap
import os
import struct
from typing import Any

from .facts import Channel, Entry, Picture, Report, Wait

TRACE = "nccl_trace_rank_"  # file name prefix that torch.distributed.flight_recorder expects
CAPACITY = 4096  # entries
_HEADER = struct.Struct("<8sII64s")  # magic, rank, capacity, label
_MAGIC = b"stledg4\n"
_START = 128
_RECORD = struct.Struct("<QdQIIB72s151s")  # index + 1, time, seq, check, channel, state, site, text
_SIZE = _RECORD.size
_STATE = struct.calcsize("<QdQII")  # offset in a record
_CLOSED = 1 << 62  # entry count of a closed ledger, so high that no call is among the last
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)

STATES = ("", "issued", "waiting", "done")
ISSUED, WAITING, DONE = 1, 2, 3


class Ledger:
    """Writer of one rank's ledger.

    Args:
        folder: An existing folder; the files are named after the rank.
        rank: The global rank.
        label: A readable name of the rank.
    """

    def __init__(self, folder: str, rank: int, label: str) -> None:
        self.folder, self.path = folder, ledger_path(folder, rank)
        self._map = map_file(self.path, _START + CAPACITY * _SIZE, os.O_TRUNC)
        self._channels = os.open(_channels_path(self.path), _FLAGS | os.O_TRUNC, 0o600)
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, rank, CAPACITY, label.encode()[:64])
        self._count = 0
        self._names: list[tuple[str, Channel]] = []

    def add_channel(self, key: str, channel: Channel) -> int:
        """Record a channel and return its number."""
        line = [key, channel.label, list(channel.members), channel.message]
        os.write(self._channels, (json.dumps(line) + "\n").encode())
        self._names.append((key, channel))
        return len(self._names) - 1

    def write(
        self, channel: int, seq: int, check: int, text: bytes, site: bytes, time: float
    ) -> int:
        """Write an entry and return its index."""
        index = self._count
        offset = _START + index % CAPACITY * _SIZE
        self._count = index + 1
        facts = index + 1, time, seq, check, channel, ISSUED, site, text
        _RECORD.pack_into(self._map, offset, *facts)
        return index

    def set_state(self, index: int, state: int) -> None:
        """Set the state of a call, unless its entry has been overwritten."""
        if index + CAPACITY > self._count:
            self._map[_START + index % CAPACITY * _SIZE + _STATE] = state

    def tail(self, limit: int) -> list[Entry]:
        """Return the last `limit` entries, oldest first."""
        found = []
        for index in range(max(0, self._count - min(limit, CAPACITY)), self._count):
            record = _RECORD.unpack_from(self._map, _START + index % CAPACITY * _SIZE)
            entry = _entry(record, self._names)
            if entry is not None:
                found.append(entry)
        return found

    def close(self, *, remove: bool) -> None:
        """Close the files, and delete them if `remove` is set."""
        self._count = _CLOSED  # a thread whose wait ends after this writes nothing
        self._map.close()
        os.close(self._channels)
        if remove:
            os.unlink(self.path)
            os.unlink(_channels_path(self.path))


def map_file(path: str, size: int, flags: int = 0) -> mmap.mmap:
    """Map a file that is private to this user into memory; create it if it is missing."""
    file = os.open(path, _FLAGS | flags, 0o600)
    try:
        os.ftruncate(file, size)
        if hasattr(os, "posix_fallocate"):  # a full disk raises here instead of SIGBUS later
            os.posix_fallocate(file, 0, size)
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def ledger_path(folder: str, rank: int) -> str:
    """Return the path of a rank's ledger."""
    return os.path.join(folder, f"rank{rank}.ledger")


def _channels_path(path: str) -> str:
    return path + ".channels"


def read_ledger(path: str) -> tuple[int, str, dict[str, Channel], list[Entry]]:
    """Read a ledger, even of a process that is dead or still writing.

    Returns:
        The rank, its label, its channels, and its last entries, oldest first.

    Raises:
        ValueError: The file is not a ledger.
    """
    with open(path, "rb") as file:
        data = file.read()
    if len(data) < _START or not data.startswith(_MAGIC):
        raise ValueError(f"{path} is no ledger")
    _, rank, capacity, name = _HEADER.unpack_from(data)
    channels: list[tuple[str, Channel]] = []
    with open(_channels_path(path), encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                key, label, members, message = json.loads(line)
                channels.append((key, Channel(label, tuple(members), message)))
    found: list[tuple[int, Entry]] = []
    for place in range(min(capacity, (len(data) - _START) // _SIZE)):
        record = _RECORD.unpack_from(data, _START + place * _SIZE)
        entry = _entry(record, channels)
        if entry is not None:
            found.append((record[0], entry))
    found.sort(key=lambda item: item[0])
    return rank, name.rstrip(b"\0").decode(errors="replace"), dict(channels), [e for _, e in found]


def _entry(record: tuple[Any, ...], channels: list[tuple[str, Channel]]) -> Entry | None:
    index, time, seq, check, channel, state, site, text = record
    if not index or channel >= len(channels) or state >= len(STATES):
        return None
    said, line = (words.rstrip(b"\0").decode(errors="replace") for words in (text, site))
    return Entry(seq, check, said, line, time, STATES[state], channels[channel][0])


def tails(entries: list[Entry], limit: int = 64) -> dict[str, dict[int, Entry]]:
    """Return the last `limit` entries of each channel, by number."""
    found: dict[str, dict[int, Entry]] = {}
    for entry in reversed(entries):
        own = found.setdefault(entry.channel, {})
        if len(own) < limit:
            own[entry.seq] = entry
    return found


_BOARD = "board-"
_PLACES = 1 << 16


class Board:
    """The last calls of this host's ranks, in shared memory.

    Gloo aborts a process that receives more bytes than it expects, before the guard could report
    it. So the first rank that comes to a call posts it here; the next ones compare theirs with it
    and wait for the verdict if they differ. That costs half a microsecond. It misses ranks of other
    hosts, and two ranks that post at the same instant.

    Args:
        folder: Folder of the ledgers, with the board's file.
    """

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, f"{_BOARD}{host_number():08x}")
        self._map = map_file(self._path, 8 * _PLACES)
        self._words = memoryview(self._map).cast("Q")

    def differs(self, channel: int, seq: int, check: int) -> bool:
        """Post a call; return whether another rank has posted a different one under its number.

        Args:
            channel: The `channel_number` of the call's channel.
            seq: The call's number in the channel.
            check: 32-bit checksum of everything that must be the same on all members.
        """
        number = channel + seq
        place, tag = number % _PLACES, number >> 16 & 0xFFFFFFFF
        seen = self._words[place]
        if seen >> 32 == tag:
            return seen != tag << 32 | check
        self._words[place] = tag << 32 | check  # an atomic write
        return False

    def close(self) -> None:
        """Close the board and remove its file; other ranks keep their mapping."""
        self._words.release()
        self._map.close()
        with contextlib.suppress(OSError):  # another rank has removed it
            os.unlink(self._path)


def channel_number(key: str) -> int:
    """Return a 48-bit hash of a channel's key."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "little")


def host_number() -> int:
    """Return a 32-bit number of this host and boot; each container counts as a host."""
    from ..dist.building import this_host  # imported late: the monitor loads this file alone

    return this_host() & 0xFFFFFFFF


def read_folder(folder: str) -> Picture:
    """Build a picture from the ledgers of a folder, skipping those that cannot be read."""
    picture = Picture({}, {})
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "rank*.ledger"))):
        try:
            rank, label, channels, entries = read_ledger(path)
        except (OSError, ValueError):
            continue
        picture.channels |= channels
        picture.reports[rank] = _report(rank, label, entries)
    for channel in picture.channels.values():
        for rank in channel.members:
            picture.reports.setdefault(rank, Report(rank, f"rank {rank} (no ledger here)"))
    return picture


def _report(rank: int, label: str, entries: list[Entry]) -> Report:
    report = Report(rank, label, tails=tails(entries, CAPACITY))
    latest = entries[-1].time if entries else 0.0
    for entry in entries:
        report.counts[entry.channel] = entry.seq + 1
    waiting = [entry for entry in entries if entry.state == "waiting"][-4:]
    for number, entry in enumerate(waiting):
        wait = Wait(number, entry.channel, entry.seq, latest - entry.time)
        report.waits.append(wait)
        report.since[number] = 0.0
    return report
