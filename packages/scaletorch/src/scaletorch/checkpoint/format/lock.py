"""One job writes into a folder: a file in it says which, and any other job is refused."""

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
    """Keep other jobs from writing into a folder, until an owner or this process is gone.

    The system's lock on the file ends with the process, however that ends. On a disk that locks
    nothing nobody is kept away.

    Raises:
        CheckpointError: Another job writes there, with its process, host and start.
    """
    key = os.getpid(), root.resolve()
    if key in _held:
        return
    with suppress(OSError):  # that nothing can be written there is the writer's to say
        key[1].mkdir(parents=True, exist_ok=True)
        if (descriptor := _take(key[1])) is None:
            return
        _held.add(key)
        for owner in [owner for owner in owners if owner is not None]:
            weakref.finalize(owner, _release, key, descriptor)


def _take(root: Path) -> int | None:
    """Return the file whose lock this process has, or None if the system locks no files."""
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
    if not os.fstat(descriptor).st_nlink:  # its job has ended and removed it meanwhile
        os.close(descriptor)
        return _take(root)
    os.ftruncate(descriptor, 0)
    where = f"on host {socket.gethostname()} since {time.ctime()}"
    os.pwrite(descriptor, f"process {os.getpid()} {where}\n".encode(), 0)
    return descriptor


def _release(key: tuple[int, Path], descriptor: int) -> None:
    if key in _held and key[0] == os.getpid():  # no child of the process that holds it
        _held.discard(key)
        with suppress(OSError):
            (key[1] / LOCK).unlink()
        os.close(descriptor)
