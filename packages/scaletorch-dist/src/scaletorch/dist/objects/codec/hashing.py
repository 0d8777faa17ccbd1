"""What it may cost to hash entries of sets and keys of dicts.

A tuple is hashed anew each time, with all tuples in it, and one that holds another twice, and that
one a third twice, does so more often than bytes can tell: 60 such take longer than anybody waits.
And numbers can be chosen to have one hash, so that a set compares each with all others.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

WORK = 10_000_000  # hashes of single values, of one object that is written or read
COLLISIONS = 4096  # entries whose hash another one of the same container has

_UNFORESEEN = frozenset((str, bytes))  # whose hashes differ from process to process


class Hashing:
    """Adds up what hashing costs, and refuses too much.

    Args:
        error: what to raise.
    """

    def __init__(self, error: type[Exception]) -> None:
        self._error = error
        self._work = 0
        self._collisions = 0

    def spend(self, entries: Collection[Any]) -> None:
        """Count the entries of one set, or the keys of one dict, before they are hashed."""
        kinds = set(map(type, entries))
        if kinds <= _UNFORESEEN:
            return
        self._work += _values(entries, {})
        if self._work > WORK:
            raise self._error("keys or entries of sets are tuples of too many values")
        self._collisions += len(entries) - len(set(map(hash, entries)))
        if self._collisions > COLLISIONS:
            raise self._error("too many keys or entries of sets have one hash")


def _values(entries: Collection[Any], known: dict[int, int]) -> int:
    """Return how many values are hashed for these entries."""
    total = len(entries)
    for each in entries:
        if type(each) is slice:  # hashed as a tuple, from Python 3.12 on
            total += _values((each.start, each.stop, each.step), known)
        elif isinstance(each, tuple):
            if id(each) not in known:
                known[id(each)] = _values(each, known)
            total += known[id(each)]
    return total
