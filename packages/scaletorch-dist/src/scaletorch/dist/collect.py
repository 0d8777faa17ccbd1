"""Collecting the results of an evaluation that the ranks shared, in the order of the samples."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

from torch.distributed import ProcessGroup

from .collectives.checks import tells_failure
from .errors import InvalidArgumentError, StateError
from .info import get_rank, get_world_size, group_ranks
from .objects import (
    all_gather_object,
    broadcast_object_list,
    dump_object,
    gather_object,
    load_object,
)

_DEVICE_NAMES = ("cpu", "gpu", "npu", "cuda", "mlu", "musa", "xpu")


@tells_failure
def collect_results(
    results: list[Any],
    size: int,
    device: str = "cpu",
    tmpdir: str | os.PathLike[str] | None = None,
    group: ProcessGroup | None = None,
) -> list[Any] | None:
    """Collect the results of samples that were dealt out to the ranks one by one.

    Args:
        results: this rank's results, in the order of its samples; anything that pickles, also None.
        size: number of samples; what was added to fill up the last round is cut off.
        device: cpu, gpu, npu, cuda, mlu, musa or xpu: where the results came from. They travel
            through the group whatever it is.
        tmpdir: a folder that all ranks share, to collect through files instead; only with "cpu".
            It is left as it was found, or gone again if it was not there.
        group: the default group by default.

    Returns:
        On the group's first rank the results in the order of the samples, elsewhere None.

    Raises:
        InvalidArgumentError: a bad argument; on every rank where a result does not pickle.
        StateError: on every rank, where a file cannot be written or read.
    """
    _check(results, size, device, tmpdir)
    if get_world_size(group) == 1:
        return results[:size]
    if tmpdir is not None:
        parts = _through_files(results, os.fspath(tmpdir), group)
    else:
        parts = gather_object(results, group_ranks(group)[0], group)
    return None if parts is None else interleave(parts)[:size]


def interleave(parts: list[list[Any]]) -> list[Any]:
    """Return the first of each part, then the second of each, and so on."""
    longest = max(map(len, parts))
    return [part[i] for i in range(longest) for part in parts if i < len(part)]


def _check(results: Any, size: Any, device: Any, tmpdir: Any) -> None:
    message = ""
    if not isinstance(results, list):
        message = f"collect_results needs a list of results, got {type(results).__name__}"
    elif not isinstance(size, int) or isinstance(size, bool) or size < 0:
        message = f"collect_results needs a size of 0 or more, got {size!r}"
    elif device not in _DEVICE_NAMES:
        message = (
            f"collect_results: device must be one of {', '.join(_DEVICE_NAMES)}, got {device!r}"
        )
    elif tmpdir is not None and device != "cpu":
        message = f"collect_results: tmpdir goes with device 'cpu', not {device!r}: leave it out"
    if message:
        raise InvalidArgumentError(message)


def _through_files(
    results: list[Any], tmpdir: str, group: ProcessGroup | None
) -> list[list[Any]] | None:
    ranks = group_ranks(group)
    first = get_rank() == ranks[0]
    made = _missing(tmpdir) if first else []
    folder, error = _make_folder(tmpdir) if first else ("", None)
    shared = [(folder, error)]
    broadcast_object_list(shared, ranks[0], group)
    folder, error = shared[0]
    parts: list[list[Any]] = []
    try:
        _raise_together(error, group)
        _raise_together(_write(results, _part(folder, get_rank())), group)
        error = _read(folder, ranks, parts) if first else None
    finally:
        if first:
            _remove([_part(folder, rank) for rank in ranks], [folder, *made])
    _raise_together(error, group)
    return parts if first else None


def _missing(path: str) -> list[str]:
    """Return those folders of a path that are not there, the deepest first."""
    missing = []
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def _make_folder(tmpdir: str) -> tuple[str, str | None]:
    try:
        os.makedirs(tmpdir, exist_ok=True)
        return tempfile.mkdtemp(prefix="scaletorch-", dir=os.path.abspath(tmpdir)), None
    except OSError as error:
        return "", str(error)


def _part(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank-{rank}")


def _write(results: list[Any], path: str) -> str | None:
    try:
        with open(path, "xb") as file:
            file.write(dump_object(results))
    except (OSError, InvalidArgumentError) as error:
        return str(error)
    return None


def _read(folder: str, ranks: tuple[int, ...], parts: list[list[Any]]) -> str | None:
    try:
        for rank in ranks:
            with open(_part(folder, rank), "rb") as file:
                parts.append(load_object(file.read()))
    except Exception as error:  # unpickling raises whatever the objects like
        return f"{type(error).__name__}: {error}"
    return None


def _raise_together(error: str | None, group: ProcessGroup | None) -> None:
    """Raise on every rank of the group if any has an error."""
    errors = zip(group_ranks(group), all_gather_object(error, group), strict=True)
    lines = [f"rank {rank}: {text}" for rank, text in errors if text]
    if lines:
        raise StateError(f"collect_results through files failed: {'; '.join(lines)}")


def _remove(files: list[str], folders: list[str]) -> None:
    """Remove our own files, and the folders that this call made while they are empty."""
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)
    for folder in folders:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
