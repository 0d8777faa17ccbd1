"""A rank's ledger: its last calls, in a file that outlives the process.

Entries are records of fixed size in a ring, written through a memory map: the last calls of a
killed or aborted rank are still there for others to read. Channels, of which there are few, are
lines of JSON in a file beside it.
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

TRACE = "nccl_trace_rank_"  # by this name torch.distributed.flight_recorder looks for files
CAPACITY = 4096  # entries
_HEADER = struct.Struct("<8sII64s")  # magic, rank, capacity, label
_MAGIC = b"stledg4\n"
_START = 128
_RECORD = struct.Struct("<QdQIIB72s151s")  # index + 1, time, seq, check, channel, state, site, text
_SIZE = _RECORD.size
_STATE = struct.calcsize("<QdQII")  # offset in a record
_CLOSED = 1 << 62  # entries: no call of a closed ledger is among its last
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)

STATES = ("", "issued", "waiting", "done")
ISSUED, WAITING, DONE = 1, 2, 3


class Ledger:
    """Writes one rank's ledger.

    Args:
        folder: An existing folder; the files are named after the rank.
        rank: The global rank.
        label: The rank's name for people.
    """

    def __init__(self, folder: str, rank: int, label: str) -> None:
        self.folder, self.path = folder, ledger_path(folder, rank)
        self._map = map_file(self.path, _START + CAPACITY * _SIZE, os.O_TRUNC)
        self._channels = os.open(_channels_path(self.path), _FLAGS | os.O_TRUNC, 0o600)
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, rank, CAPACITY, label.encode()[:64])
        self._count = 0
        self._names: list[tuple[str, Channel]] = []

    def add_channel(self, key: str, channel: Channel) -> int:
        """Write down a channel, and return its number."""
        line = [key, channel.label, list(channel.members), channel.message]
        os.write(self._channels, (json.dumps(line) + "\n").encode())
        self._names.append((key, channel))
        return len(self._names) - 1

    def write(
        self, channel: int, seq: int, check: int, text: bytes, site: bytes, time: float
    ) -> int:
        """Write an entry, and return its index."""
        index = self._count
        offset = _START + index % CAPACITY * _SIZE
        self._count = index + 1
        facts = index + 1, time, seq, check, channel, ISSUED, site, text
        _RECORD.pack_into(self._map, offset, *facts)
        return index

    def set_state(self, index: int, state: int) -> None:
        """Write down how far a call is, while its entry is still there."""
        if index + CAPACITY > self._count:
            self._map[_START + index % CAPACITY * _SIZE + _STATE] = state

    def tail(self, limit: int) -> list[Entry]:
        """Return the last entries, from the oldest on."""
        found = []
        for index in range(max(0, self._count - min(limit, CAPACITY)), self._count):
            record = _RECORD.unpack_from(self._map, _START + index % CAPACITY * _SIZE)
            entry = _entry(record, self._names)
            if entry is not None:
                found.append(entry)
        return found

    def close(self, *, remove: bool) -> None:
        """Close the files, and delete them if `remove` says so."""
        self._count = _CLOSED  # who waits for a call after the guard ended writes nothing
        self._map.close()
        os.close(self._channels)
        if remove:
            os.unlink(self.path)
            os.unlink(_channels_path(self.path))


def map_file(path: str, size: int, flags: int = 0) -> mmap.mmap:
    """Return the memory of a file of this user alone, and make it if it is missing."""
    file = os.open(path, _FLAGS | flags, 0o600)
    try:
        os.ftruncate(file, size)
        if hasattr(os, "posix_fallocate"):  # a full disk shows here, and not as SIGBUS later
            os.posix_fallocate(file, 0, size)
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def ledger_path(folder: str, rank: int) -> str:
    """Return where a rank's ledger is."""
    return os.path.join(folder, f"rank{rank}.ledger")


def _channels_path(path: str) -> str:
    return path + ".channels"


def read_ledger(path: str) -> tuple[int, str, dict[str, Channel], list[Entry]]:
    """Read a ledger, also of a process that is dead or still writing.

    Returns:
        The rank, its label, its channels, and its last entries from the oldest on.

    Raises:
        ValueError: The file is no ledger.
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
    """The calls that this host's ranks have posted last, in memory that they share.

    Gloo aborts a process that receives more bytes than it expects, before anybody could tell of it.
    So the second rank that comes to a call compares it with the call that the first one has posted
    here, and waits for the verdict if they differ. That costs half a microsecond; ranks of other
    hosts are not seen, nor is one that posts in the same instant.

    Args:
        folder: Where the ledgers are; the board's file is there until all ranks have left.
    """

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, f"{_BOARD}{host_number():08x}")
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


def host_number() -> int:
    """Return a number of this host and boot, in 32 bits; containers of one machine are hosts."""
    from ..dist.building import this_host  # the monitor, which reads this file, has no parent

    return this_host() & 0xFFFFFFFF


def read_folder(folder: str) -> Picture:
    """Return all that the ledgers of a folder tell, without those that cannot be read."""
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
