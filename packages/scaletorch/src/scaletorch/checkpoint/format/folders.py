"""Folders of checkpoints: names, lock, finishing, removal, detection of other libraries'."""

from __future__ import annotations

import os
import re
import socket
import time
import warnings
import weakref
from contextlib import suppress
from fnmatch import fnmatch
from itertools import count
from pathlib import Path

from ..agreement import CheckpointError, DamagedCheckpointError
from .metadata import METADATA, unseal
from .safetensors_files import flush_folder

FILE_NAME = re.compile(r"rank-\d{5,}\.safetensors")
UNFINISHED = ".unfinished"
LOCK = "scaletorch.lock"
_locked: set[tuple[int, Path]] = set()  # process and folder
_REMOVED = ".removed"
_FINISHED = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(r"step-(\d{8,})(-\d+)?\.(unfinished|removed)")

_OURS = (LOCK, "step-*.unfinished", "step-*.removed", "step-*.damaged")
_LOGS = (
    "*.log", "*.txt", "*.json", "*.jsonl", "*.yaml", "*.yml", "*.toml", "*.csv", "*.md", "*.py",
    "*.sh", "*.out", "*.err", "*.png", "events.out.tfevents.*", ".git*",
)  # fmt: skip


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return root / f"step-{step:08d}"


def unfinished_folder(root: Path, step: int) -> Path:
    """Return the folder in which a step's checkpoint is written."""
    return root / f"step-{step:08d}{UNFINISHED}"


def is_step(folder: Path) -> bool:
    """Return whether a folder's name is that of one checkpoint, finished or not."""
    return _FINISHED.fullmatch(folder.name.removesuffix(UNFINISHED)) is not None


def finished(root: Path) -> list[Path]:
    """Return the folders in `root` with the name of a finished checkpoint, newest first."""
    return [path for _, path in sorted(_find(root, _FINISHED), reverse=True)]


def _find(root: Path, name: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Return the steps and paths of the folders in `root` whose name matches a pattern."""
    return [
        (int(match[1]), path)
        for path in (root.iterdir() if root.is_dir() else ())
        if (match := name.fullmatch(path.name)) and path.is_dir()
    ]


def candidates(root: Path) -> list[Path]:
    """Return the checkpoints to load: `root` itself if it is one, or those in it, newest first."""
    if root.is_file():
        raise CheckpointError(f"{root} is a file: pass the folder of one checkpoint, or of several")
    # A killed save may have moved an older checkpoint of its step aside without naming the new one.
    for _, path in _find(root.parent if is_step(root) else root, _LEFT):
        final = path.with_name(path.name.removesuffix(UNFINISHED))
        moved = any(other != path for other in final.parent.glob(f"{final.name}[.-]*"))
        if path != final and moved and not final.exists() and _is_ours(path):
            with suppress(OSError):  # without write permission it stays unfinished
                os.replace(path, final)
    if is_step(root) and root.name.endswith(UNFINISHED):
        raise DamagedCheckpointError(f"{root} was never finished")
    found = [root] if is_step(root) or (root / METADATA).is_file() else finished(root)
    if not found:
        refuse_foreign(root)
    return found


def latest(folder: str | Path) -> Path | None:
    """Return the newest finished checkpoint in `folder`; None if there is none.

    It may be damaged; `load` detects this and takes the one before.
    """
    return next((path for path in finished(Path(folder)) if (path / METADATA).is_file()), None)


def lock(root: Path, owner: object) -> None:
    """Lock a folder against other jobs until `owner` is collected or this process ends.

    The operating system releases the lock even of a killed process; a file system may have none.
    """
    key = os.getpid(), root.resolve()
    if key in _locked:
        return
    try:
        import fcntl

        key[1].mkdir(parents=True, exist_ok=True)
        descriptor = os.open(key[1] / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except (ImportError, OSError) as error:
        if isinstance(error, PermissionError) and (key[1] / LOCK).exists():
            raise CheckpointError(
                f"{key[1] / LOCK} cannot be opened for writing, so another job may be saving "
                "there: once its owner's jobs have ended, remove it or make it writable for you, "
                "or save into another folder"
            ) from None
        return  # if nothing can be written there, the save itself says so
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        job = f"process {os.getpid()} on host {socket.gethostname()} since {time.ctime()}\n"
        os.pwrite(descriptor, job.encode(), 0)
        _locked.add(key)
        weakref.finalize(owner, _unlock, key, descriptor)
    except (BlockingIOError, PermissionError):
        job = os.read(descriptor, 1000).decode(errors="replace").strip()
        os.close(descriptor)
        raise CheckpointError(
            f"{root} is being written by {job or 'another process'}: end that job, or save into "
            "another folder"
        ) from None
    except OSError:  # this file system has no locks
        os.close(descriptor)


def _unlock(key: tuple[int, Path], descriptor: int) -> None:
    if key[0] == os.getpid():  # a forked child does not hold its parent's lock
        _locked.discard(key)
        os.close(descriptor)


def start(root: Path, step: int) -> None:
    """Create the unfinished folder of a step, without the files of an earlier attempt."""
    final = step_folder(root, step)
    if final.exists() and not (final / METADATA).exists() and not _own_files(final):
        raise CheckpointError(
            f"{final} exists and is no checkpoint; it stays as it is: save into another folder"
        )
    unfinished = unfinished_folder(root, step)
    unfinished.mkdir(parents=True, exist_ok=True)
    for path in _own_files(unfinished):
        path.unlink()


def finish(root: Path, step: int, keep: int | None) -> None:
    """Give a written checkpoint its final name, and remove those before the last `keep`.

    Checkpoints of later steps stay and are not counted: a run may have gone back to this step.
    """
    final, unfinished = step_folder(root, step), unfinished_folder(root, step)
    flush_folder(unfinished)
    aside = _move_aside(final) if final.exists() else None
    try:
        os.replace(unfinished, final)
    except FileNotFoundError:
        if not final.exists():  # another program's `load` may have renamed it, see `candidates`
            raise
    flush_folder(root)
    if aside is not None and aside.name.endswith(_REMOVED):
        _delete(aside)
    if keep is not None:
        found = finished(root)
        for old in [path for path in found[found.index(final) :] if _is_ours(path)][keep:]:
            _remove(old)
        for left_at, left in _find(root, _LEFT):  # left by programs that were killed
            if left_at <= step:
                _remove(left)


def _own_files(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if p.name == METADATA or FILE_NAME.fullmatch(p.name)]


def _is_ours(folder: Path) -> bool:
    try:
        unseal(folder / METADATA)
    except DamagedCheckpointError:
        return False
    return True


def _move_aside(folder: Path) -> Path:
    """Rename an older checkpoint to `.removed`, or to `.damaged` if it is damaged, to keep it."""
    kind = _REMOVED if _is_ours(folder) else ".damaged"
    names = (folder.with_name(f"{folder.name}{f'-{n}' if n else ''}{kind}") for n in count())
    aside = next(path for path in names if not path.exists())
    os.replace(folder, aside)
    return aside


def _remove(folder: Path) -> None:
    """Remove a checkpoint, finished or not; files that are not ours stay, with the folder."""
    try:
        _delete(_move_aside(folder) if _FINISHED.fullmatch(folder.name) else folder)
    except OSError as error:
        warnings.warn(f"an old checkpoint could not be removed: {error}", stacklevel=2)


def _delete(folder: Path) -> None:
    for path in _own_files(folder):
        path.unlink()
    with suppress(OSError):  # it holds files that are not ours
        folder.rmdir()


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder with files, at any depth, that may be another library's checkpoint."""
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        place = path.relative_to(folder)
        harmless = _matches(place.parts[0], _OURS) or _matches(path.name, _LOGS)
        if path.is_file() and not harmless:
            raise CheckpointError(
                f"{folder} has no checkpoint of scaletorch.checkpoint.save, but {place}, and that "
                "is no log: load it before parallelize with import_dcp, import_safetensors or the "
                "library that wrote it, or start the new run in another folder"
            )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
