"""Numbers of several cuts at once, place by place: lists, as in `Holdings.cuts`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add
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
