"""The folder of a job's ledgers: it is named, made, read, and removed when it is old."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import tempfile

from ..dist.errors import InvalidArgumentError, StateError
from .board import PREFIX as BOARD
from .facts import Entry, Picture, Report, Wait
from .ledger import TRACE, read_ledger, read_owner, tails
from .processes import host_number, process_state

PREFIX = "scaletorch-guard-"
KEPT = 4  # folders of ended jobs, the latest
WIDTH = 4096  # entries of a channel that are compared
_LONGEST = 512  # bytes of a path, which travels to all ranks


def choose_folder(base: str | None) -> str:
    """Return a new name for a folder of one job, in `base` or in the temporary folder.

    Raises:
        InvalidArgumentError: The path is too long.
    """
    base = tempfile.gettempdir() if base is None else os.path.abspath(base)
    path = os.path.join(base, f"{PREFIX}{secrets.token_hex(8)}")
    if len(path.encode()) > _LONGEST:
        raise InvalidArgumentError(f"the folder's path is too long: {path}")
    return path


def make_private(folder: str) -> bool:
    """Make a folder that this user alone can read; return whether it was not there yet.

    Raises:
        StateError: Somebody else has one of that name.
    """
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        if not _is_private(folder):
            raise StateError(f"{folder} is not a folder of this user alone") from None
        return False
    return True


def _is_private(folder: str) -> bool:
    status = os.lstat(folder)
    return status.st_uid == os.getuid() and status.st_mode & 0o170077 == 0o040000


def remove_old(base: str) -> None:
    """Remove this user's oldest ledgers in a folder, if all processes that wrote them are gone.

    Args:
        base: The temporary folder; a folder that a user names is never tidied.
    """
    ended = [
        path for path in glob.glob(os.path.join(glob.escape(base), f"{PREFIX}*")) if _done(path)
    ]
    with contextlib.suppress(OSError):  # another job tidies at the same time
        for path in sorted(ended, key=os.path.getmtime, reverse=True)[KEPT:]:
            shutil.rmtree(path)


def _done(path: str) -> bool:
    """Return whether a folder has ledgers alone, of processes of this host that are gone."""
    try:
        if not _is_private(path):
            return False
        names = [name for name in os.listdir(path) if not name.startswith((BOARD, TRACE))]
        ledgers = [name for name in names if name.endswith(".ledger")]
        if {*names} != {*ledgers, *(f"{name}.channels" for name in ledgers)} or not ledgers:
            return False
        owners = [read_owner(os.path.join(path, name)) for name in ledgers]
    except (OSError, ValueError):
        return False
    return all(host == host_number() and process_state(pid) == "X" for pid, host in owners)


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
    report = Report(rank, label, tails=tails(entries, WIDTH))
    latest = entries[-1].time if entries else 0.0
    for entry in entries:
        report.counts[entry.channel] = entry.seq + 1
    waiting = [entry for entry in entries if entry.state == "waiting"][-4:]
    for number, entry in enumerate(waiting):
        wait = Wait(number, entry.channel, entry.seq, latest - entry.time)
        report.waits.append(wait)
        report.since[number] = 0.0
    return report
