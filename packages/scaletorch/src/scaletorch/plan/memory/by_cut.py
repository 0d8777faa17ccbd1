"""Numbers of several cuts at once, place by place: lists, as in `Holdings.cuts`.

Whole numbers that are weighed and summed very often are packed into one that has 64 bits for each
cut, so that a sum of all cuts is one addition.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import add
from sys import byteorder
from typing import TypeVar

N = TypeVar("N", int, float)


def plus(numbers: list[N], others: list[N]) -> list[N]:
    """Return the sum of both, cut by cut."""
    return [*map(add, numbers, others)]


def scaled(numbers: list[N], factor: int) -> list[N]:
    """Return so many times as much."""
    return [number * factor for number in numbers]


def total(each: Iterable[list[N]]) -> list[N]:
    """Return the sum of all, cut by cut."""
    return [*map(sum, zip(*each, strict=True))]


def most(each: Sequence[list[N]]) -> list[N]:
    """Return the largest of all, cut by cut."""
    return [*map(max, *each)] if len(each) > 1 else each[0]


def packed(numbers: Iterable[int]) -> int:
    """Return them as one number; sums of such are below 2**64.

    Raises:
        OverflowError: One is below 0, or 2**64 or more: it would change those of other cuts.
    """
    return int.from_bytes(array("Q", numbers).tobytes(), byteorder)


def unpacked(number: int, cuts: int) -> list[int]:
    """Return the numbers of so many cuts."""
    return array("Q", number.to_bytes(8 * cuts, byteorder)).tolist()
