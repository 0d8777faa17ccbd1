"""Checkpoints on the disk: their names, how one is finished, and which are removed."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import suppress
from itertools import count
from pathlib import Path

from ..dist.errors import InvalidArgumentError
from .errors import CheckpointError, DamagedCheckpointError
from .files import flush_folder
from .metadata import FILE_NAME, METADATA, unseal

_FINISHED = re.compile(r"step-(\d{8,})")
UNFINISHED = ".unfinished"
_REMOVED = ".removed"


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return root / f"step-{step:08d}"


def is_step(folder: Path) -> bool:
    """Tell whether a folder has the name of one checkpoint, not of a place for several."""
    return _FINISHED.fullmatch(folder.name.removesuffix(UNFINISHED)) is not None


def finished(root: Path) -> list[Path]:
    """Return the folders in ``root`` that have a finished checkpoint's name, the newest first."""
    found = [
        (int(match[1]), path)
        for path in (root.iterdir() if root.is_dir() else ())
        if (match := _FINISHED.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def latest(folder: str | Path) -> Path | None:
    """Return the newest finished checkpoint in ``folder``; None where there is none.

    It may be damaged: `load` finds that, and takes the one before.
    """
    return next((path for path in finished(Path(folder)) if (path / METADATA).is_file()), None)


def start(root: Path, step: int) -> Path:
    """Make the folder that a checkpoint is written into, empty of what an earlier try left.

    Raises:
        CheckpointError: The step's own folder is there, and is nothing that this library wrote.
    """
    final = step_folder(root, step)
    if final.exists() and not (final / METADATA).exists() and not _own_files(final):
        raise CheckpointError(
            f"{final} is there and is no checkpoint; it stays as it is: save into another folder"
        )
    unfinished = final.with_name(final.name + UNFINISHED)
    unfinished.mkdir(parents=True, exist_ok=True)
    for path in _own_files(unfinished):
        path.unlink()
    return unfinished


def finish(root: Path, step: int, keep: int | None) -> Path:
    """Give a written checkpoint its name, and remove those before the last ``keep``."""
    final = step_folder(root, step)
    unfinished = final.with_name(final.name + UNFINISHED)
    flush_folder(unfinished)
    aside = _move_aside(final) if final.exists() else None
    os.replace(unfinished, final)
    flush_folder(root)
    if aside is not None and aside.name.endswith(_REMOVED):
        _delete(aside)
    if keep is not None:
        for old in [path for path in finished(root) if _is_ours(path)][keep:]:
            _remove(old)
    return final


def check_keep(keep: int | None) -> None:
    """Refuse to keep none."""
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise InvalidArgumentError(f"keep must be a number of checkpoints, at least 1, got {keep}")


def _own_files(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if p.name == METADATA or FILE_NAME.fullmatch(p.name)]


def _is_ours(folder: Path) -> bool:
    try:
        unseal(folder / METADATA)
    except DamagedCheckpointError:
        return False
    return True


def _move_aside(folder: Path) -> Path:
    """Take an older checkpoint of the same step out of the way; a damaged one is kept."""
    kind = _REMOVED if _is_ours(folder) else ".damaged"
    names = (folder.with_name(f"{folder.name}{n or ''}{kind}") for n in count())
    aside = next(path for path in names if not path.exists())
    os.replace(folder, aside)
    return aside


def _remove(folder: Path) -> None:
    """Remove a finished checkpoint; what is not ours in it is left, with the folder."""
    try:
        _delete(_move_aside(folder))
    except OSError as error:
        warnings.warn(f"an old checkpoint could not be removed: {error}", stacklevel=2)


def _delete(folder: Path) -> None:
    for path in _own_files(folder):
        path.unlink()
    with suppress(OSError):  # something that is not ours is in it
        folder.rmdir()
