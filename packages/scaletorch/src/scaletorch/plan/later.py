"""A tuple of which each item is made when it is first looked at, or one behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeVar, overload

T = TypeVar("T")


class Later(Sequence[T]):
    """What `items` yields, no more of it than someone looks at; pickled as a plain tuple.

    Args:
        items: Yields them.
        length: How many there are; None if only all of them tell that.
    """

    def __init__(self, items: Iterable[T], length: int | None = None) -> None:
        self._length, self._items = length, iter(items)
        self._made: list[T] = []

    def _until(self, stop: int | None) -> list[T]:
        self._made += islice(self._items, None if stop is None else max(0, stop - len(self._made)))
        return self._made

    def _all(self) -> tuple[T, ...]:
        return tuple(self._until(None))

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[T, ...]: ...
    def __getitem__(self, at: int | slice) -> T | tuple[T, ...]:
        """Return one or some of it."""
        if isinstance(at, slice):
            behind = at.stop is None or min(at.start or 0, at.stop, at.step or 1) < 0
            return tuple(self._until(None if behind else at.stop)[at])
        return self._until(None if at < 0 else at + 1)[at]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._until(None)) if self._length is None else self._length

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._until(1))

    def __eq__(self, other: object) -> bool:
        """Return whether the other one has the same in the same order."""
        return self._all() == (other._all() if isinstance(other, Later) else other)

    def __hash__(self) -> int:
        """Return the hash of the tuple."""
        return hash(self._all())

    def __repr__(self) -> str:
        """Return the tuple's text."""
        return repr(self._all())

    def __reduce__(self) -> tuple[type[tuple[T, ...]], tuple[tuple[T, ...]]]:
        """Pickle the tuple."""
        return tuple, (self._all(),)
