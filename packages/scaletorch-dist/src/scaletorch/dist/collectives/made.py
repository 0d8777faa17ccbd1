"""How a tensor could be made again: told by what communicates, heard by what would not keep it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

Made = Callable[[Tensor, Callable[[Tensor], Tensor], Tensor], None]

_listener: ContextVar[Made | None] = ContextVar("_listener", default=None)


@contextmanager
def hear_made(listener: Made) -> Iterator[None]:
    """Hear, while the body runs, of tensors that ranks could make again.

    Args:
        listener: Called with a tensor, what makes it of its source, and the source. Every rank of
            the group makes it again, in the same order, or none does.
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell_made(result: Tensor, make: Callable[[Tensor], Tensor], source: Tensor) -> None:
    """Tell whoever listens how a tensor was made."""
    listener = _listener.get()
    if listener is not None:
        listener(result, make, source)
