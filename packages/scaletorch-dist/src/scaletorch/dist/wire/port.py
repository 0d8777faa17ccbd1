"""Where a guard, if there is one, is told of every call and of every wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup


class Guard(Protocol):
    """The interface of the guard that `scaletorch.guard` installs while it is on."""

    def record(self, group: ProcessGroup, call: str, facts: Sequence[Any]) -> object:
        """Note a collective that this thread is about to make."""

    def record_message(
        self, group: ProcessGroup, data: Tensor, peer: int, tag: int, sends: bool
    ) -> object:
        """Note one end of a message; return what tells it apart."""

    def run(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make the backend's call for the last thing noted; wrap the handle that it returns."""

    def run_noted(
        self, notes: Sequence[object], call: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Make the backend's call for these notes, and wrap the handle, or handles, of it."""

    def tell(self, error: BaseException) -> bool:
        """Tell all ranks of an exception; return whether they hear of a fault."""


T = TypeVar("T")

guard: Guard | None = None


def install_guard(chosen: Guard | None) -> None:
    """Have every call told to a guard, or to none."""
    global guard
    guard = chosen


def tell_guard(error: BaseException) -> bool:
    """Tell all ranks at once of an exception that ends this rank's work, before it is raised on.

    Returns:
        Whether a guard is on, so that all ranks hear of a fault; else they must be told otherwise.
    """
    told = guard
    return told is not None and told.tell(error)


class _Notes(threading.local):
    """What each thread's calls are made for."""

    last: object = None  # the collective noted last
    chosen: object = None  # one noted before, whose calls are made now


_notes = _Notes()


def record(group: ProcessGroup, call: str, facts: Sequence[Any]) -> None:
    """Tell the guard, if there is one, of a collective that this thread is about to make."""
    told = guard  # another thread may end it meanwhile
    if told is not None:
        _notes.last = told.record(group, call, facts)


def last_note() -> object:
    """Return what the guard has noted of this thread's last collective; None without a guard."""
    return None if guard is None else _notes.last


def as_noted(note: object, stage: Callable[[bool], T]) -> T:
    """Start a later stage of a collective that was noted before."""
    if note is None:
        return stage(True)
    _notes.chosen = note
    try:
        return stage(True)
    finally:
        _notes.chosen = None


def run_told(call: Callable[..., Any], args: Any, options: Any) -> Any:
    """Make a backend's call that may block, so that the guard, which is there, can free it."""
    told = guard
    if told is None:
        return call(*args, **options)
    if _notes.chosen is not None:
        return told.run_noted((_notes.chosen,), call, *args, **options)
    return told.run(call, *args, **options)


def note(data: Tensor, peer: int, members: ProcessGroup, tag: int, sends: bool) -> object:
    """Tell the guard, if there is one, of one end of a message."""
    told = guard
    return None if told is None else told.record_message(members, data, peer, tag, sends)


def post(call: Callable[..., Any], args: tuple[Any, ...], *notes: object) -> Any:
    """Make the backend's call for messages that the guard has been told of."""
    told = guard
    return call(*args) if told is None else told.run_noted(notes, call, *args)
