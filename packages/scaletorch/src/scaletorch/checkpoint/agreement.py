"""Saving and loading on all ranks: if one rank fails, all raise the same error."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup

from ..dist import all_reduce, broadcast_object_list, gather_object, get_default_group, get_timeout
from ..dist.building import name_ranks
from ..dist.errors import ScaletorchError
from ..parallel.pg_manager import ProcessGroupManager, axis_group, get_process_group_manager

T = TypeVar("T")
_groups: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()


class CheckpointError(ScaletorchError, RuntimeError):
    """A checkpoint cannot be saved, or does not fit the model; the same error on every rank."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete, or has changed since it was saved."""


class Ranks:
    """All ranks of a program, in a gloo group of their own, so saves do not disturb training."""

    def __init__(self) -> None:
        world = get_default_group()
        if world is not None and world not in _groups:
            group = c10d.new_group(backend="gloo", timeout=get_timeout())
            all_reduce(torch.zeros(1), group=group)  # connects all ranks before any goes on
            _groups[world] = group
        self.group = None if world is None else _groups[world]  # None is one process

    def on_first(self, task: Callable[[], T]) -> T:
        """Run a task on rank 0, and return its result, or raise its error, on every rank."""
        return self.collect("", lambda: None, lambda _: task())

    def all_or_none(self, prefix: str, task: Callable[[], T]) -> T:
        """Run a task without communication on every rank; if it fails on one, raise on all."""
        own: list[T] = []
        self.collect(prefix, lambda: own.append(task()), lambda _: None)
        return own[0]

    def collect(
        self, prefix: str, task: Callable[[], Any], conclude: Callable[[list[Any]], T]
    ) -> T:
        """Run a task on every rank, combine the values on rank 0, and return the result everywhere.

        Errors begin with `prefix`; a rank with another kind of error of its own raises that.
        """
        value, failed = None, None
        try:
            value = task()
        except Exception as error:  # any kind: the other ranks must know
            failed = error
        reports = gather_object((value, failed and _describe(failed)), 0, self.group)
        answer: list[Any] = [(None, None)]
        if reports is not None:
            answer = [_conclude(prefix, reports, conclude)]
        broadcast_object_list(answer, 0, self.group)
        result, failure = answer[0]
        if failure is None:
            return result  # type: ignore[no-any-return]
        if failed is not None and not isinstance(failed, CheckpointError | OSError):
            raise failed
        text, damaged = failure
        raise (DamagedCheckpointError if damaged else CheckpointError)(text) from failed


def _conclude(prefix: str, reports: list[Any], conclude: Callable[[list[Any]], Any]) -> Any:
    """Return the result and None, or None and the ranks' errors: damage only if all of them are."""
    texts: dict[str, list[int]] = {}
    for rank, (_, failure) in enumerate(reports):
        if failure:
            texts.setdefault(failure[0], []).append(rank)
    if texts:
        lines = [f"{name_ranks(ranks)}: {text}" for text, ranks in texts.items()]
        damaged = all(failure[1] for _, failure in reports if failure)
        return None, (f"{prefix}: " + "\n".join(lines), damaged)
    try:
        return conclude([value for value, _ in reports]), None
    except Exception as error:  # any kind: the other ranks must know
        text, damaged = _describe(error)
        return None, (f"{prefix}: {text}" if prefix else text, damaged)


def _describe(error: BaseException) -> tuple[str, bool]:
    """Return an error's text, and whether the checkpoint is damaged."""
    kind = "" if isinstance(error, ScaletorchError) else f"{type(error).__name__}: "
    return f"{kind}{error}", isinstance(error, DamagedCheckpointError)


def find_manager(manager: ProcessGroupManager | None) -> ProcessGroupManager:
    """Return the given manager; for None the current one, or one for this process alone."""
    found = get_process_group_manager() if manager is None else manager
    if found is None:
        axis_group("cp_dp")  # raises if there are several ranks
        found = ProcessGroupManager()
    found.group("cp_dp")  # raises if the manager is destroyed
    return found
