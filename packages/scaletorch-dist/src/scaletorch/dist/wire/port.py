"""The port through which a guard, if there is one, hears of every call and every wait."""

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

    def run(
        self, notes: Sequence[object], call: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Make the backend's call for what was noted, and wrap the handle, or handles, of it."""

    def tell(self, error: BaseException) -> bool:
        """Tell all ranks of an exception; return whether they hear of a fault."""


T = TypeVar("T")

guard: Guard | None = None


def install_guard(chosen: Guard | None) -> None:
    """Have every call told to a guard, or to none."""
    global guard, _notes
    guard, _notes = chosen, _Notes()


def tell_guard(error: BaseException) -> bool:
    """Tell all ranks at once of an exception that ends this rank's work, before it is raised on.

    Returns:
        Whether a guard is on, so that all ranks hear of a fault; else they must be told otherwise.
    """
    told = guard
    return told is not None and told.tell(error)


class _Notes(threading.local):
    """The note of the collective whose calls a thread makes now: of the last, as a rule."""

    last: object = None


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
    before, _notes.last = _notes.last, note
    try:
        return stage(True)
    finally:
        _notes.last = before


def run_told(call: Callable[..., Any], args: Any, options: Any) -> Any:
    """Make a backend's call that may block, so that the guard, if there is one, can free it."""
    told = guard
    if told is None:
        return call(*args, **options)
    return told.run((_notes.last,), call, *args, **options)


def note(data: Tensor, peer: int, members: ProcessGroup, tag: int, sends: bool) -> object:
    """Tell the guard, if there is one, of one end of a message."""
    told = guard
    return None if told is None else told.record_message(members, data, peer, tag, sends)


def post(call: Callable[..., Any], args: tuple[Any, ...], *notes: object) -> Any:
    """Make the backend's call for messages that the guard has been told of."""
    told = guard
    return call(*args) if told is None else told.run(notes, call, *args)
