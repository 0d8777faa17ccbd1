"""A rank's ledger: its last calls, in a file that outlives the process.

Entries are records of fixed size in a ring, written through a memory map: the last calls of a
killed or aborted rank are still there for others to read. Channels, of which there are few, are
lines of JSON in a file beside it.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from typing import Any

from .facts import Channel, Entry
from .processes import host_number

TRACE = "nccl_trace_rank_"  # by this name torch.distributed.flight_recorder looks for files
CAPACITY = 4096  # entries
_HEADER = struct.Struct("<8sIIQ64sI")  # magic, rank, capacity, pid, label, host
_MAGIC = b"stledg2\n"
_FACTS = struct.Struct("<QdQIIB")  # index + 1, time, seq, check, channel, state
_START = 128
_SIZE = 256
_SITE = 72
_TEXT = _SIZE - _FACTS.size - _SITE - 2
_RECORD = struct.Struct(f"<QdQIIBB{_SITE}sB{_TEXT - 1}s")
_STATE = struct.calcsize("<QdQII")
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
        name = label.encode()[:64]
        owner = os.getpid(), name, host_number()
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, rank, CAPACITY, *owner)
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
        _RECORD.pack_into(
            self._map, offset, index + 1, time, seq, check, channel, ISSUED,
            min(len(site), _SITE), site, min(len(text), _TEXT - 1), text,
        )  # fmt: skip
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
    data, (_, rank, capacity, _, name, _) = _read(path)
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


def read_owner(path: str) -> tuple[int, int]:
    """Return the process that wrote a ledger, and its host.

    Raises:
        ValueError: The file is no ledger.
    """
    _, (_, _, _, pid, _, host) = _read(path, _START)
    return pid, host


def _read(path: str, limit: int = -1) -> tuple[bytes, tuple[Any, ...]]:
    with open(path, "rb") as file:
        data = file.read(limit)
    if len(data) < _START or not data.startswith(_MAGIC):
        raise ValueError(f"{path} is no ledger")
    return data, _HEADER.unpack_from(data)


def _entry(record: tuple[Any, ...], channels: list[tuple[str, Channel]]) -> Entry | None:
    index, time, seq, check, channel, state, site_length, site, text_length, text = record
    if not index or channel >= len(channels) or state >= len(STATES):
        return None
    return Entry(
        seq,
        check,
        text[:text_length].decode(errors="replace"),
        site[:site_length].decode(errors="replace"),
        time,
        STATES[state],
        channels[channel][0],
    )


def tails(entries: list[Entry], limit: int = 64) -> dict[str, dict[int, Entry]]:
    """Return the last `limit` entries of each channel, by number."""
    found: dict[str, dict[int, Entry]] = {}
    for entry in reversed(entries):
        own = found.setdefault(entry.channel, {})
        if len(own) < limit:
            own[entry.seq] = entry
    return found
