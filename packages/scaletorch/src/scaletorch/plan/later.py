"""A tuple that is made when it is first looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar, overload

T = TypeVar("T")


class Later(Sequence[T]):
    """What `make` returns, made once, and not before someone asks; pickled as a plain tuple.

    Args:
        make: Called with `arguments`.
        arguments: Of it.
    """

    def __init__(self, make: Callable[..., tuple[T, ...]], *arguments: Any) -> None:
        self._make, self._arguments = make, arguments

    @cached_property
    def _made(self) -> tuple[T, ...]:
        return self._make(*self._arguments)

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[T, ...]: ...
    def __getitem__(self, at: int | slice) -> T | tuple[T, ...]:
        """Return one or some of it."""
        return self._made[at]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._made)

    def __eq__(self, other: object) -> bool:
        """Return whether the other one has the same in the same order."""
        return self._made == (other._made if isinstance(other, Later) else other)

    def __hash__(self) -> int:
        """Return the hash of the tuple."""
        return hash(self._made)

    def __repr__(self) -> str:
        """Return the tuple's text."""
        return repr(self._made)

    def __reduce__(self) -> tuple[type[tuple[T, ...]], tuple[tuple[T, ...]]]:
        """Pickle the tuple."""
        return tuple, (self._made,)
