"""The hook through which every call and wait is reported to a guard, if one is installed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup


class Guard(Protocol):
    """The interface of the guard that `scaletorch.guard` installs while it is on."""

    def record(self, group: ProcessGroup, call: str, facts: Sequence[Any]) -> object:
        """Record a collective that this thread is about to start; return its note."""

    def record_message(
        self, group: ProcessGroup, data: Tensor, peer: int, tag: int, sends: bool
    ) -> object:
        """Record a send or receive of this rank; return its note."""

    def run(
        self, notes: Sequence[object], call: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Make the backend's call for the recorded notes, and wrap the handles it returns."""

    def tell(self, error: BaseException) -> bool:
        """Report an exception to all ranks; return whether they will raise a fault."""


T = TypeVar("T")

guard: Guard | None = None


def install_guard(chosen: Guard | None) -> None:
    """Report every call to `chosen` from now on, or to no guard if it is None."""
    global guard, _notes
    guard, _notes = chosen, _Notes()


def tell_guard(error: BaseException) -> bool:
    """Report an exception that ends this rank's work to all ranks, before re-raising it.

    Returns:
        Whether the guard reports a fault to all ranks; if not, the caller must report it.
    """
    current = guard
    return current is not None and current.tell(error)


class _Notes(threading.local):
    """Per thread, the note of the current collective, which is usually the last one recorded."""

    last: object = None


_notes = _Notes()


def record(group: ProcessGroup, call: str, facts: Sequence[Any]) -> None:
    """Report a collective that this thread is about to start to the guard, if there is one."""
    current = guard  # another thread may uninstall it meanwhile
    if current is not None:
        _notes.last = current.record(group, call, facts)


def last_note() -> object:
    """Return the guard's note of this thread's last collective, or None without a guard."""
    return None if guard is None else _notes.last


def as_noted(note: object, stage: Callable[[bool], T]) -> T:
    """Start a later stage of an earlier collective, under that collective's note."""
    before, _notes.last = _notes.last, note
    try:
        return stage(True)
    finally:
        _notes.last = before


def run_guarded(call: Callable[..., Any], args: Any, options: Any) -> Any:
    """Make a backend's call that may block, through the guard if there is one."""
    current = guard
    if current is None:
        return call(*args, **options)
    return current.run((_notes.last,), call, *args, **options)


def note(data: Tensor, peer: int, members: ProcessGroup, tag: int, sends: bool) -> object:
    """Report a send or receive to the guard, if there is one; return the guard's note."""
    current = guard
    return None if current is None else current.record_message(members, data, peer, tag, sends)


def post(call: Callable[..., Any], args: tuple[Any, ...], *notes: object) -> Any:
    """Make the backend's call for messages, through the guard that noted them if there is one."""
    current = guard
    return call(*args) if current is None else current.run(notes, call, *args)
