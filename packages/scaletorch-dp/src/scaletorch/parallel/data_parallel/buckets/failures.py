"""What a backward's end found wrong: raised when all is over, or held until all ranks know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ....dist.errors import NonFiniteError


class Failing(Protocol):
    """Whoever synchronises the gradients of one group.

    Attributes:
        failed: What its last synchronisation found, until it is taken.
        holds: Whether somebody else is to raise it.
    """

    failed: NonFiniteError | None
    holds: bool


def raise_failed(syncs: Iterable[Failing]) -> None:
    """Raise what the first of some found, if nobody else is to raise it.

    Raises:
        NonFiniteError: A gradient is not finite.
    """
    found = [*filter(None, [_taken(each) for each in syncs if not each.holds])]
    if found:
        raise found.pop(0)  # out of the list: its traceback has this frame


@contextmanager
def failures_held(syncs: Sequence[Failing]) -> Iterator[list[NonFiniteError]]:
    """Yield a list that has at the end what these found, which is not raised meanwhile."""
    found: list[NonFiniteError] = []
    for each in syncs:
        each.holds = True
    try:
        yield found
    finally:
        for each in syncs:
            each.holds = False
            error = _taken(each)
            found += [] if error is None else [error]


def _taken(sync: Failing) -> NonFiniteError | None:
    error, sync.failed = sync.failed, None
    return error
