"""The handle of an asynchronous call: waiting for it finishes everything the call promised."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")

# What `async_op` is where a call returns its result, and where it returns a Work.
Sync = Literal[False]
Async = Literal[True]


class Work(Generic[T]):
    """Communication under way; `wait()` completes it and returns what a synchronous call returns.

    It keeps alive what the backend reads and writes. Drop it unfinished, and a send may be lost.
    """

    __slots__ = ("_finish", "_handles", "_keep", "_result")

    def __init__(self, handles: Iterable[Any], finish: Callable[[], T], keep: Any = None) -> None:
        """Take the backend's handles, what remains to do after them, and what must live so long."""
        self._handles = [handle for handle in handles if handle is not None]
        self._finish: Callable[[], T] | None = finish
        self._keep = keep
        self._result: T | None = None

    def wait(self) -> T:
        """Wait for the communication, then finish it; a second call returns the same again.

        On devices with streams, the current stream waits and not the host.
        """
        if self._finish is not None:
            for handle in self._handles:
                handle.wait()
            self._result = self._finish()
            self._finish = self._keep = None
            self._handles.clear()
        return self._result  # type: ignore[return-value]

    def is_completed(self) -> bool:
        """Return whether `wait()` would return without waiting, as far as the backend can tell."""
        return all(handle.is_completed() for handle in self._handles)


def settled(
    handles: Iterable[Any], finish: Callable[[], T], async_op: bool, keep: Any = None
) -> T | Work[T]:
    """Return the finished result, or a Work that will give it."""
    return Work(handles, finish, keep) if async_op else finish()


def given(result: T) -> T:
    """Finish what has its result already."""
    return result


def nothing() -> None:
    """Finish what has nothing left to do."""
