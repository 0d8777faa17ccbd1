"""Folders of checkpoints: names, lock, finishing, removal, and detection of other libraries'."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import warnings
import weakref
from contextlib import suppress
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from typing import TextIO

from ..agreement import CheckpointError, DamagedCheckpointError
from .metadata import METADATA, unseal
from .safetensors_files import flush_folder

FILE_NAME = re.compile(r"rank-\d{5,}\.safetensors")
UNFINISHED = ".unfinished"
_REMOVED = ".removed"
_locked: dict[tuple[int, Path], TextIO] = {}  # by process and folder
_LOCK = "scaletorch.lock"
_FINISHED = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(r"step-(\d{8,})(-\d+)?\.(unfinished|removed)")

_OURS = (_LOCK, "step-*.unfinished", "step-*.removed", "step-*.damaged")
_LOGS = (
    "*.log", "*.txt", "*.json", "*.jsonl", "*.yaml", "*.yml", "*.toml", "*.csv", "*.md", "*.py",
    "*.sh", "*.out", "*.err", "*.png", "events.out.tfevents.*", ".git*",
)  # fmt: skip


def step_folder(root: Path, step: int, ending: str = "") -> Path:
    """Return the folder of a step's checkpoint, or with `UNFINISHED` the one it is written in."""
    return root / f"step-{step:08d}{ending}"


def _find(root: Path, name: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Return the steps and paths of the folders in `root` whose name matches, newest first."""
    found = [
        (int(match[1]), path)
        for path in (root.iterdir() if root.is_dir() else ())
        if (match := name.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found, reverse=True)


def candidates(root: Path) -> list[Path]:
    """Return the checkpoints to load: `root` itself if it is one, or those in it, newest first."""
    if root.is_file():
        raise CheckpointError(f"{root} is a file: pass the folder of one checkpoint, or of several")
    is_step = _FINISHED.fullmatch(root.name.removesuffix(UNFINISHED)) is not None
    # A killed save may have moved an older checkpoint of its step aside without naming the new one.
    for _, path in _find(root.parent if is_step else root, _LEFT):
        final = path.with_name(path.name.removesuffix(UNFINISHED))
        moved = any(other != path for other in final.parent.glob(f"{final.name}[.-]*"))
        if path != final and moved and not final.exists() and _is_ours(path):
            with suppress(OSError):  # without write permission it stays unfinished
                os.replace(path, final)
    if is_step and root.name.endswith(UNFINISHED):
        raise DamagedCheckpointError(f"{root} was never finished")
    if is_step or (root / METADATA).is_file():
        return [root]
    found = [path for _, path in _find(root, _FINISHED)]
    if not found:
        _refuse_foreign(root)
    return found


def latest(folder: str | Path) -> Path | None:
    """Return the newest finished checkpoint in `folder`; None if there is none.

    It may be damaged; `load` detects this and takes the one before.
    """
    found = (path for _, path in _find(Path(folder), _FINISHED))
    return next((path for path in found if (path / METADATA).is_file()), None)


def lock(root: Path, owner: object) -> None:
    """Lock a folder against other jobs until `owner` is collected or this process ends.

    The operating system releases the lock even of a killed process; a file system may have none.
    """
    key = os.getpid(), root.resolve()
    if key in _locked:
        return
    root.mkdir(parents=True, exist_ok=True)
    file = (root / _LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        job = file.read().strip() or "another process"
        file.close()
        text = f"{root} is being written by {job}: end it, or save elsewhere"
        raise CheckpointError(text) from None
    except OSError:  # this file system has no locks
        pass
    file.truncate(0)
    print(f"process {os.getpid()} on host {socket.gethostname()}", file=file, flush=True)
    _locked[key] = file
    weakref.finalize(owner, _unlock, key)


def _unlock(key: tuple[int, Path]) -> None:
    if key[0] == os.getpid():  # a forked child does not hold its parent's lock
        _locked.pop(key).close()


def start(root: Path, step: int) -> None:
    """Create the unfinished folder of a step, without the files of an earlier attempt."""
    final, unfinished = step_folder(root, step), step_folder(root, step, UNFINISHED)
    if final.exists() and not _own_files(final):
        raise CheckpointError(f"{final} is no checkpoint; it stays as it is: save elsewhere")
    unfinished.mkdir(parents=True, exist_ok=True)
    for path in _own_files(unfinished):
        path.unlink()


def finish(root: Path, step: int, keep: int | None) -> None:
    """Give a written checkpoint its final name, and remove those before the last `keep`.

    Checkpoints of later steps stay and are not counted: a run may have gone back to this step.
    """
    final, unfinished = step_folder(root, step), step_folder(root, step, UNFINISHED)
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
        found = [path for at, path in _find(root, _FINISHED) if at <= step and _is_ours(path)]
        left = [path for at, path in _find(root, _LEFT) if at <= step]  # by killed programs
        for old in [*found[keep:], *left]:
            _remove(old)


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


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder with files, at any depth, that may be another library's checkpoint."""
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        place = path.relative_to(folder)
        harmless = any(fnmatch(place.parts[0], pattern) for pattern in _OURS)
        harmless = harmless or any(fnmatch(path.name, pattern) for pattern in _LOGS)
        if path.is_file() and not harmless:
            raise CheckpointError(
                f"{folder} has no checkpoint of scaletorch.checkpoint.save, but {place}, and that "
                "is no log: load it before parallelize with import_dcp, import_safetensors or the "
                "library that wrote it, or start the new run in another folder"
            )
