"""Collect the results of a distributed evaluation in the order of the samples."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from ..errors import InvalidArgumentError, StateError
from ..wire.backend import process_group
from ..world.info import get_rank, group_ranks
from .object_calls import broadcast_object_list, errors_of_all, gather_object
from .packing import Terms, dump_object, load_object

T = TypeVar("T")

_DEVICE_NAMES = ("cpu", "gpu", "npu", "cuda", "mlu", "musa", "xpu")


def collect_results(
    results: list[Any],
    size: int,
    device: str = "cpu",
    tmpdir: str | os.PathLike[str] | None = None,
    group: ProcessGroup | None = None,
    *,
    allow_pickle: bool = True,
) -> list[Any] | None:
    """Gather the results of samples that were assigned to the ranks round-robin.

    Args:
        results: This rank's results in the order of its samples; any objects that pickle, also
            None.
        size: Number of samples; the results of padding at the end are dropped.
        device: Where the results came from: cpu, gpu, npu, cuda, mlu, musa or xpu. It does not
            change how they are sent.
        tmpdir: A folder that all ranks share, to collect through files instead; only with "cpu".
            It is created if it is missing. The files are private to this user, and are removed.
        group: The default group by default.
        allow_pickle: As in `broadcast_object_list`.

    Returns:
        The results in the order of the samples on the group's first rank, None on other ranks.

    Raises:
        InvalidArgumentError: An argument is invalid, or (on every rank) a result cannot be sent.
        StateError: A file cannot be written or read; raised on every rank.
    """
    _check(results, size, device, tmpdir)
    terms = Terms(allow_pickle)
    members = process_group(group)
    if members is None or members.size() == 1:
        return results[:size]
    if tmpdir is not None:
        shards = _through_files(results, os.fspath(tmpdir), members, terms)
    else:
        first = group_ranks(members)[0]
        shards = gather_object(results, first, members, allow_pickle=allow_pickle)
    if shards is None:
        return None
    longest = max(map(len, shards))
    return [shard[i] for i in range(longest) for shard in shards if i < len(shard)][:size]


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
        message = f"collect_results: tmpdir needs device 'cpu', got {device!r}: leave tmpdir out"
    if message:
        raise InvalidArgumentError(message)


def _through_files(
    results: list[Any], tmpdir: str, members: ProcessGroup, terms: Terms
) -> list[list[Any]] | None:
    """Collect through a temporary folder in `tmpdir` that is private to this user."""
    ranks = group_ranks(members)
    first = get_rank() == ranks[0]
    sent: list[Any] = [_caught(partial(_make_folder, tmpdir)) if first else None]
    broadcast_object_list(sent, ranks[0], members)
    folder, error = sent[0]
    _raise_together(error if first else None, members)
    shards: list[list[Any]] | None = None
    try:
        path = Path(folder, f"rank-{get_rank()}")
        _raise_together(_caught(lambda: path.write_bytes(dump_object(results, terms)))[1], members)
        if first:
            paths = [Path(folder, f"rank-{rank}") for rank in ranks]
            shards, error = _caught(lambda: [_read(path, terms) for path in paths])
    finally:
        if first:
            shutil.rmtree(folder, ignore_errors=True)
    _raise_together(error, members)
    return shards


def _make_folder(parent: str) -> str:
    os.makedirs(parent, 0o700, exist_ok=True)
    return tempfile.mkdtemp(prefix="scaletorch-", dir=os.path.abspath(parent))


def _read(path: Path, terms: Terms) -> Any:
    return load_object(memoryview(path.read_bytes()), terms)


def _caught(call: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return a call's result and None, or None and its error as text for the other ranks."""
    try:
        return call(), None
    except Exception as error:  # pickling may raise anything
        return None, f"{type(error).__name__}: {error}"


def _raise_together(error: str | None, members: ProcessGroup) -> None:
    """Raise on every rank of the group if any has an error."""
    errors = errors_of_all(error, members)
    if errors:
        raise StateError(f"collect_results through files failed: {'; '.join(errors)}")
