"""Exchanges under way: what is done while they travel, and the wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from ....dist import Work

_call: Callable[[], object] | None = None


@contextmanager
def while_travelling(call: Callable[[], object]) -> Iterator[None]:
    """Have something called wherever experts are about to wait, once what they wait for has begun.

    These are the counts, the rows and the results of a call, and gradients on both ways: the same
    places in the same order on every rank of the experts, whichever tokens it has. On all threads
    of this process, since autograd has its own.
    """
    global _call
    before, _call = _call, call
    try:
        yield
    finally:
        _call = before


def landed(works: Sequence[Work[Tensor]]) -> list[Tensor]:
    """Return what all of these bring, once it is here."""
    if _call is not None:
        _call()
    return [work.wait() for work in works]
