"""One job writes into a folder: a file in it says which, and any other job is refused."""

from __future__ import annotations

import os
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path

from ..errors import CheckpointError

LOCK = "scaletorch.lock"
_held: set[tuple[int, Path]] = set()  # process and folder


def hold(root: Path, *owners: object) -> None:
    """Keep other jobs from writing into a folder, until an owner or this process is gone.

    The system's lock on the file ends with the process, however that ends. On a disk that locks
    nothing the file itself counts, unless a process of this host has left it.

    Raises:
        CheckpointError: Another job writes there, with its process, host and start.
    """
    key = os.getpid(), root.resolve()
    if key in _held:
        return
    with suppress(OSError):  # that nothing can be written there is the writer's to say
        key[1].mkdir(parents=True, exist_ok=True)
        descriptor = _take(key[1])
        _held.add(key)
        for owner in [owner for owner in owners if owner is not None]:
            weakref.finalize(owner, _release, key, descriptor)


def _take(root: Path) -> int:
    path, host = root / LOCK, f"on host {socket.gethostname()} since"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    free = _lock(descriptor)
    said = os.read(descriptor, 1000).decode(errors="replace").strip()
    if free is False or (free is None and said and not _has_ended(said, host)):
        os.close(descriptor)
        raise CheckpointError(
            f"{root} is being written by {said or 'another process'}: end that job, or save into "
            f"another folder{'' if free is False else f'. If it has ended, remove {path}'}"
        )
    if not os.fstat(descriptor).st_nlink:  # its job has ended and removed it meanwhile
        os.close(descriptor)
        return _take(root)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} {host} {time.ctime()}\n".encode(), 0)
    return descriptor


def _lock(descriptor: int) -> bool | None:
    """Return whether the system locks a file for this process; None if it locks no files."""
    try:
        import fcntl

        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except (ImportError, OSError):
        return None
    return True


def _has_ended(said: str, host: str) -> bool:
    number = said.split()[1] if host in said else ""
    try:
        os.kill(int(number), 0)
    except (ValueError, PermissionError):
        return False
    except ProcessLookupError:
        return True
    return int(number) == os.getpid()


def _release(key: tuple[int, Path], descriptor: int) -> None:
    if key in _held and key[0] == os.getpid():  # no child of the process that holds it
        _held.discard(key)
        with suppress(OSError):
            (key[1] / LOCK).unlink()
        os.close(descriptor)
