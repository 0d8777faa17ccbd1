"""A lock file, so that only one job at a time saves into a folder."""

from __future__ import annotations

import os
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path

from ..together import CheckpointError

LOCK = "scaletorch.lock"
_held: set[tuple[int, Path]] = set()  # process and folder


def hold(root: Path, *owners: object) -> None:
    """Lock a folder against other jobs until one of the owners is collected or this process ends.

    The operating system releases the lock when the process ends, even if it is killed. On a file
    system without locks other jobs are not kept out.

    Raises:
        CheckpointError: Another job writes there; the text has its process, host and start.
    """
    key = os.getpid(), root.resolve()
    if key in _held:
        return
    with suppress(OSError):  # if nothing can be written there, the save itself says so
        key[1].mkdir(parents=True, exist_ok=True)
        if (descriptor := _take(key[1])) is None:
            return
        _held.add(key)
        for owner in [owner for owner in owners if owner is not None]:
            weakref.finalize(owner, _release, key, descriptor)


def _take(root: Path) -> int | None:
    """Lock the file and return its descriptor, or None if the system does not lock files."""
    try:
        import fcntl
    except ImportError:
        return None
    path = root / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        said = os.read(descriptor, 1000).decode(errors="replace").strip()
        os.close(descriptor)
        raise CheckpointError(
            f"{root} is being written by {said or 'another process'}: end that job, or save into "
            "another folder"
        ) from None
    except OSError:
        os.close(descriptor)
        return None
    if not os.fstat(descriptor).st_nlink:  # its job ended meanwhile and removed the file
        os.close(descriptor)
        return _take(root)
    os.ftruncate(descriptor, 0)
    where = f"on host {socket.gethostname()} since {time.ctime()}"
    os.pwrite(descriptor, f"process {os.getpid()} {where}\n".encode(), 0)
    return descriptor


def _release(key: tuple[int, Path], descriptor: int) -> None:
    if key in _held and key[0] == os.getpid():  # a forked child does not hold its parent's lock
        _held.discard(key)
        with suppress(OSError):
            (key[1] / LOCK).unlink()
        os.close(descriptor)
