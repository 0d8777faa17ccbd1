"""What goes beside a pickle of plain objects, and the errors of all that reads and writes one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Named = Mapping[str, type]  # the dataclasses and enums that a call takes for plain


class NotPlainError(TypeError):
    """An object that is not plain; the message says which type and why."""


class MalformedError(ValueError):
    """Bytes that hold no plain object."""


class Sent:
    """What a writer gathers beside the pickle.

    Attributes:
        values: Tensors and arrays whose bytes follow the pickle, in this order.
        named: Dataclasses and enums that the caller takes for plain.
    """

    def __init__(self, named: Named) -> None:
        self.values: list[Any] = []
        self.named = named


class Received:
    """The bytes behind a pickle, and what else makers need.

    Attributes:
        named: Dataclasses and enums that the caller takes for plain.
    """

    def __init__(self, values: memoryview, named: Named) -> None:
        self._values = values
        self._position = 0
        self.named = named

    def take(self, count: int) -> memoryview:
        """Return the next bytes, each of which is given once: no copies beyond what arrived."""
        start, self._position = self._position, self._position + count
        if self._position > len(self._values):
            raise MalformedError("cut short")
        return self._values[start : self._position]

    def check_end(self) -> None:
        """Check that no bytes are left."""
        if self._position != len(self._values):
            raise MalformedError("more bytes than objects")


def check(right: bool, what: str) -> None:
    """Raise MalformedError unless what was read is right."""
    if not right:
        raise MalformedError(f"no {what}")
