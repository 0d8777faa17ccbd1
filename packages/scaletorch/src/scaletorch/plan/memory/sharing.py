"""Bytes that a backward needs above what it keeps, with the buckets of a sharded optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from operator import add

from ..gradients.filling import LATER, Filled, bytes_of, filled
from ..gradients.gathering import gathered, gathered_forward
from ..holding import Holdings
from ..layout import Layout
from .gradual import Rows, needs_of
from .sizes import Sizes, sizes_of
from .working import Action, latest


def sharing(known: Holdings, layout: Layout, number: int, action: Action) -> int:
    """Return what an action needs that sums gradients into shards, above what all keep.

    Args:
        known: Of the description.
        layout: With ZeRO.
        number: Of the rank.
        action: "B", or "I" or "W" for a half of a backward.
    """
    kind, chunk, _ = action
    if layout.zero == 3:
        moments = gathered(known, layout, number)
        comes = [own for (own,) in moments.bytes]
    else:
        moments = filled(known, layout, number, kind, chunk)
        comes = bytes_of(known, layout, number, kind, chunk)
    sizes, at = sizes_of(known, layout), known.place_of_cut(layout)
    kinds = known.content(number).chunks[chunk][::-1]
    left = [sizes.halves[own][at] for own in kinds]
    if kind == "W":  # each frees what the first half has left
        largest = latest(known, layout, number)[chunk][at]
        base = [*(largest - size for size in _behind(left)[:-1]), -sum(left)]
        return _most(comes, [base[block] for block in moments.blocks])
    needs, rows = needs_of(known, layout, sizes, at, half=kind == "I")
    key = layout.cut, number, kind, chunk, layout.zero
    if key not in known.made:
        known.made[key] = _places(moments, kinds, rows)
    places: list[int] = known.made[key]
    base = _under(sizes, at, kinds, left if kind == "I" else [0] * len(left))
    each = zip(moments.blocks, places, strict=True)
    return _most(comes, [base[block] + needs[place] for block, place in each])


def _under(sizes: Sizes, at: int, kinds: tuple[int, ...], left: list[int]) -> list[float]:
    """Return what is there more or less than before when each block runs, and when all have."""
    freed = zip(left, kinds, strict=True)
    found = _behind(halves - sizes.under[own][at] for halves, own in freed)
    for place, behind in enumerate(kinds[:-1], 1):
        found[place] += sizes.entered[behind][at]  # the gradient of its output
    return found


def gathering(known: Holdings, layout: Layout, number: int) -> int:
    """Return what a forward needs with ZeRO 3, above what all keep."""
    sizes, at = sizes_of(known, layout), known.place_of_cut(layout)
    kinds = known.content(number).chunks[0]
    under = [*accumulate(sizes.under[kind][at] for kind in kinds)]
    own = [sizes.forward[kind][at] - under[-1] for kind in kinds]
    return _most(map(add, under, own), gathered_forward(known, layout, number))


def _most(numbers: Iterable[float], others: Iterable[float]) -> int:
    """Return the largest sum in whole bytes, or 0."""
    largest: float = max(map(add, numbers, others))
    return max(0, round(largest))


def _behind(sizes: Iterable[float]) -> list[float]:
    """Return the sums of those before each, and of all."""
    return [*accumulate(sizes, initial=0.0)]


def _places(moments: Filled, kinds: tuple[int, ...], rows: Rows) -> list[int]:
    """Return for each moment the place of what its block needs then."""
    each = (*kinds, -1)
    own = zip(moments.blocks, moments.names, moments.parts, strict=True)
    return [rows.get((each[at], name, part), rows[each[at], "", LATER]) for at, name, part in own]
