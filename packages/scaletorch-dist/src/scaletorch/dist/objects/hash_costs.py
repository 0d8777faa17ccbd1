"""What it may cost to hash entries of sets and keys of dicts.

A tuple is hashed anew each time, with all tuples in it, and one that holds another twice, and that
one a third twice, does so more often than bytes can tell: 60 such take longer than anybody waits.
Tuples in tuples, 100,000 deep, end the process, since hashing them overruns the stack. And numbers
can be chosen to have one hash, so that a set compares each with all others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from .beside_pickle import MalformedError

WORK = 10_000_000  # hashes of single values, of one object that is read
COLLISIONS = 4096  # entries whose hash another one of the same container has
DEPTH = 500  # tuples in one another

_UNFORESEEN = frozenset((str, bytes))  # whose hashes differ from process to process


class Hashing:
    """Adds up what hashing costs, and refuses too much."""

    def __init__(self) -> None:
        self._work = 0
        self._collisions = 0
        self._hashes: dict[int, tuple[Collection[Any], set[int]]] = {}

    def spend(self, entries: Collection[Any], container: Collection[Any]) -> None:
        """Count entries of one set, or keys of one dict, before they are hashed.

        Args:
            entries: The new ones.
            container: What they go into; may have entries already.

        Raises:
            MalformedError: Hashing them takes too long.
        """
        if set(map(type, entries)) <= _UNFORESEEN:
            return
        self._work += _values(entries, {}, 0)
        if self._work > WORK:
            raise MalformedError("keys or entries of sets are tuples of too many values")
        before = self._hashes_of(container) if container else set()
        hashes = set(map(hash, entries)) - before
        before |= hashes
        self._collisions += len(entries) - len(hashes)
        if self._collisions > COLLISIONS:
            raise MalformedError("too many keys or entries of sets have one hash")

    def _hashes_of(self, container: Collection[Any]) -> set[int]:
        """Return the hashes in a container that is filled step by step, from the second one on."""
        if id(container) not in self._hashes:  # with the container, so that its id stays its own
            self._hashes[id(container)] = container, set(map(hash, container))
        return self._hashes[id(container)][1]


def _values(entries: Collection[Any], known: dict[int, int], depth: int) -> int:
    """Return how many values are hashed for these entries; a long int counts as many."""
    if depth > DEPTH:
        raise MalformedError("keys or entries of sets are tuples in too many tuples")
    total = len(entries)
    for each in entries:
        if type(each) is int:
            total += each.bit_length() >> 6
        elif (parts := _hashed_parts(each)) is not None:
            if id(each) not in known:
                known[id(each)] = _values(parts, known, depth + 1)
            total += known[id(each)]
    return total


def _hashed_parts(value: Any) -> tuple[Any, ...] | None:
    """Return what is hashed when this is, or None if that costs nothing."""
    if isinstance(value, tuple):
        return value
    if type(value) is slice:  # hashed as a tuple, from Python 3.12 on
        return value.start, value.stop, value.step
    if dataclasses.is_dataclass(value):
        return tuple(getattr(value, field.name) for field in dataclasses.fields(value))
    return None
