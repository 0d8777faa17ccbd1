"""One job writes into a folder: a file in it says which, and any other job is refused."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

from ..errors import CheckpointError

LOCK = "scaletorch.lock"
_BEAT, _STALE = 20.0, 300.0  # seconds between signs of life, and without one
_held: set[tuple[int, Path]] = set()  # process and folder


def hold(root: Path, *owners: object) -> None:
    """Keep other jobs from writing into a folder, until an owner or this process is gone.

    The system's lock on a file ends with the process, however that ends. It need not reach other
    hosts on every shared disk, so a thread touches the file, and a fresh one is respected.

    Raises:
        CheckpointError: Another job writes there, with its process, host and start.
    """
    key = os.getpid(), root.resolve()
    if key in _held:
        return
    with suppress(OSError):  # that nothing can be written there is the writer's to say
        key[1].mkdir(parents=True, exist_ok=True)
        descriptor, stop = _take(key[1]), threading.Event()
        _held.add(key)
        for owner in [owner for owner in owners if owner is not None]:
            weakref.finalize(owner, _release, key, descriptor, stop)
        threading.Thread(target=_beat, args=(key[1] / LOCK, stop), daemon=True).start()


def _take(root: Path) -> int:
    path, host = root / LOCK, f"on host {socket.gethostname()} since"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    free, found = _lock(descriptor), os.fstat(descriptor)
    said = os.read(descriptor, 1000).decode(errors="replace").strip()
    fresh = said and time.time() - found.st_mtime < _STALE
    if free is False or (fresh and (free is None or host not in said)):
        os.close(descriptor)
        raise CheckpointError(
            f"{root} is being written by {said or 'another process'}: end that job, or save into "
            f"another folder{'' if free is False else f'. If it has ended, remove {path}'}"
        )
    if not found.st_nlink:  # its job has ended and removed it meanwhile
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


def _beat(path: Path, stop: threading.Event) -> None:
    while not stop.wait(_BEAT):
        with suppress(OSError):
            os.utime(path)


def _release(key: tuple[int, Path], descriptor: int, stop: threading.Event) -> None:
    if key[0] == os.getpid() and not stop.is_set():  # no child of the process that holds it
        stop.set()
        _held.discard(key)
        with suppress(OSError):
            (key[1] / LOCK).unlink()
        os.close(descriptor)
