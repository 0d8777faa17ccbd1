"""Bytes out and bytes in, and the dispatch of items to the kinds that know their types.

Items are always written many at a time, all of one type together, so that a million numbers are
one array and a million records a few; a single object is a list of one.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .hashing import Hashing

DEPTH = 100  # containers in containers; each level takes a few frames of Python's stack
MIXED = 0  # in place of a kind's code: one code for each item follows
_FORMS: dict[int, Any] = {4: "i", 8: "q"}  # bytes of a number → as struct calls it

Write = Callable[["Writer", list[Any]], None]
Read = Callable[["Reader", int], list[Any]]


class NotPlainError(TypeError):
    """An object that the codec does not take; the message says which type and why."""


class MalformedError(ValueError):
    """Bytes that no `Writer` wrote."""


class Writer:
    """A growing buffer, and the mutable objects in it.

    Attributes:
        data: what has been written.
        hashing: what reading it will cost.
    """

    def __init__(self, codes: Mapping[type, int], writes: Mapping[int, Write]) -> None:
        self.data = bytearray()
        self.hashing = Hashing(NotPlainError)
        self._codes = codes
        self._writes = writes
        self._seen: list[set[int]] = []
        self._depth = 0

    def items(self, items: list[Any]) -> None:
        """Write items of any kinds; the reader knows how many.

        Raises:
            NotPlainError: an item is not plain, or lies too deep.
        """
        if not items:
            return
        if self._depth == DEPTH:
            raise NotPlainError(f"containers lie in one another more than {DEPTH} deep")
        self._depth += 1
        kinds = set(map(self._codes.__getitem__, set(map(type, items))))
        if len(kinds) == 1:
            (code,) = kinds
            self.data.append(code)
            self._writes[code](self, items)
        else:
            self._mixed(items, sorted(kinds))
        self._depth -= 1

    def _mixed(self, items: list[Any], kinds: list[int]) -> None:
        codes = bytes(map(self._codes.__getitem__, map(type, items)))
        self.data.append(MIXED)
        self.data += codes
        for kind in kinds:
            chosen = codes.translate(bytes(kind == code for code in range(256)))
            self._writes[kind](self, list(itertools.compress(items, chosen)))

    def number(self, value: int) -> None:
        """Write one number."""
        self.numbers((value,))

    def numbers(self, values: Iterable[int]) -> None:
        """Write numbers of at most 64 bits, in the fewest bytes that all fit in.

        Raises:
            struct.error: one has more bits; nothing is written then.
        """
        values = list(values)
        width, packed = _packed(values)
        self.data.append(width)
        self.data += packed

    def own(self, places: set[int], items: Iterable[Any]) -> None:
        """Note mutable objects, each of which may come once.

        Args:
            places: what `id` says of each.
            items: the objects.

        Raises:
            NotPlainError: one has come before.
        """
        if not all(map(places.isdisjoint, self._seen)):
            name = type(next(iter(items))).__name__
            raise NotPlainError(f"a {name} is referred to from several levels, or from itself")
        self._seen.append(places)


class Reader:
    """A position in a buffer.

    Attributes:
        data: all bytes, writable.
        position: of the next one.
        hashing: what it has cost.
    """

    def __init__(self, data: bytearray | memoryview, reads: Mapping[int, Read]) -> None:
        self.data = memoryview(data)
        self.position = 0
        self.hashing = Hashing(MalformedError)
        self._reads = reads
        self._depth = 0

    def items(self, count: int) -> list[Any]:
        """Read items of any kinds."""
        if not count:
            return []
        if self._depth == DEPTH:
            raise MalformedError("nested too deep")
        self._depth += 1
        (code,) = self.take(1)
        if code != MIXED:
            items = self._reads[code](self, count)
        else:
            codes = bytes(self.take(count))
            kinds = sorted(set(codes))
            by_kind = {kind: iter(self._reads[kind](self, codes.count(kind))) for kind in kinds}
            items = list(map(next, map(by_kind.__getitem__, codes)))
        self._depth -= 1
        return items

    def take(self, count: int) -> memoryview:
        """Read so many bytes."""
        start, self.position = self.position, self.position + count
        if count < 0 or self.position > len(self.data):
            raise MalformedError("cut short")
        return self.data[start : self.position]

    def length(self) -> int:
        """Read one number that is not negative."""
        return self.lengths(1)[0]

    def numbers(self, count: int) -> list[int]:
        """Read numbers."""
        (width,) = self.take(1)
        if width == 1:
            return list(self.take(count))
        values: list[int] = self.take(width * count).cast(_FORMS[width]).tolist()
        return values

    def lengths(self, count: int) -> list[int]:
        """Read numbers, none of them negative."""
        values = self.numbers(count)
        if count and min(values) < 0:
            raise MalformedError("a negative length")
        return values


def _packed(values: list[int]) -> tuple[int, bytes]:
    """Return bytes of a number, the fewest that all fit into, and the numbers in them."""
    try:
        return 1, bytes(values)
    except ValueError:
        pass
    try:
        return 4, struct.pack(f"{len(values)}i", *values)
    except struct.error:
        return 8, struct.pack(f"{len(values)}q", *values)
