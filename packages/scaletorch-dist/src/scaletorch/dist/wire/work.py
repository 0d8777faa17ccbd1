"""The handle of an asynchronous call; waiting for it completes the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, TypeVar

from torch.distributed import ProcessGroup

T = TypeVar("T")
Group = ProcessGroup | None

# Types of `async_op` in overloads: a call returns its result (Sync) or a Work (Async).
Sync = Literal[False]
Async = Literal[True]


class Work(Generic[T]):
    """Communication in flight; `wait()` completes it and returns what a synchronous call returns.

    It keeps the backend's buffers alive. If it is dropped before `wait()`, a send may be lost.
    """

    __slots__ = ("_finish", "_handles", "_keep", "_result")

    def __init__(self, handles: Iterable[Any], finish: Callable[[], T], keep: Any = None) -> None:
        """Store the backend's handles, the completion to run after them, and buffers to keep."""
        self._handles = [handle for handle in handles if handle is not None]
        self._finish: Callable[[], T] | None = finish
        self._keep = keep
        self._result: T | None = None

    def wait(self) -> T:
        """Wait for the communication and complete it; later calls return the same result.

        On devices with streams the current stream waits, not the host.
        """
        if self._finish is not None:
            for handle in self._handles:
                handle.wait()
            self._result = self._finish()
            self._finish = self._keep = None
            self._handles.clear()
        return self._result  # type: ignore[return-value]

    def is_completed(self) -> bool:
        """Return whether `wait()` would return at once, as far as the backend knows."""
        return all(handle.is_completed() for handle in self._handles)


def settled(
    handles: Iterable[Any], finish: Callable[[], T], async_op: bool, keep: Any = None
) -> T | Work[T]:
    """Return the result of `finish`, or for `async_op` a Work that will return it."""
    return Work(handles, finish, keep) if async_op else finish()


def identity(result: T) -> T:
    """Return the result: a completion with nothing left to do."""
    return result


def nothing() -> None:
    """Do nothing: a completion without a result."""
