"""The most that buckets of a sharded optimizer need while an action runs, without following it.

A search asks it of very many layouts; `filling` has what comes when.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..holding.buckets import Bucket, Buckets
from ..holding.holdings import Holdings
from ..layout import Layout
from .filling import MADE


def most_filled(known: Holdings, layout: Layout, number: int, kind: str, chunk: int) -> int:
    """Return what an action of a rank needs at most, without following it.

    Gradients come about in the order of buckets, so that three are open at a time. But if one
    also waits for another chunk or half of a backward, which get nothing, all that get any may wait
    behind it, until they go one by one when backward ends; those that get none are filled then.
    """
    grid = layout.grid
    key = grid.tp, grid.ep, grid.etp, grid.cp * grid.dp, layout.zero, number, kind, chunk
    found: int | None = known.most.get(key)
    if found is None:
        found = known.most[key] = sum(
            _most_of(known, buckets, grid.edp if axis == "edp" else grid.cp * grid.dp,
                     layout.zero, (kind, chunk))
            for axis, buckets in known.buckets(layout, number).items()
        )  # fmt: skip
    return found


def _most_of(
    known: Holdings, buckets: Buckets, ranks: int, zero: int, action: tuple[str, int]
) -> int:
    """Return what buckets need at most that are summed over the same ranks."""
    key = buckets, ranks, zero, action
    found: int | None = known.most.get(key)
    if found is None:
        own = [
            (b, times)
            for b, times in buckets.each
            if b.sharded and (zero < 2 or b.reached(action[1]))
        ]
        sums = [b.padded(ranks) * b.sum_item(known.optimizer) for b, _ in own]
        found = sum(b.padded(ranks) // ranks * b.master_item(1) * times for b, times in own)
        if sums and ranks > 1:
            found += max(
                2 * size // (1 if b.summed_here(known.optimizer) else ranks)
                for size, (b, _) in zip(sums, own, strict=True)
            )
        if zero == 2:
            found += _most_open(own, sums, *action)
        known.most[key] = found
    return found


def _most_open(
    own: Sequence[tuple[Bucket, int]], sums: Sequence[int], kind: str, chunk: int
) -> int:
    made = {(chunk, late) for late in MADE[kind]}
    each = [
        (size, times, {*b.backwards, *b.also}) for size, (b, times) in zip(sums, own, strict=True)
    ]
    if all(waits <= made for _, _, waits in each):
        return _largest(3, ((size, times) for size, times, _ in each))
    waiting = sum(size * times for size, times, waits in each if waits & made)
    return waiting + _largest(2, ((size, times) for size, times, waits in each if not waits & made))


def _largest(count: int, sizes: Iterable[tuple[int, int]]) -> int:
    """Return the sum of the largest; each size comes with how many there are."""
    return sum(sorted(size for size, times in sizes for _ in range(min(times, count)))[-count:])
