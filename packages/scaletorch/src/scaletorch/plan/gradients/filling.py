"""Buckets of a sharded optimizer's gradients while a backward fills and sums them.

As `DataParallelBucket` has them: a bucket's memory is there from its first gradient, and with its
last one it leaves, in the order of all, into memory for what other ranks send: on gloo of the same
length, as for sums of 16-bit floats, else of a shard. Both go, and this rank's share stays, once it
is summed: that is taken to be when the next one leaves. What is left over leaves when backward
ends. With ZeRO 1 all leave in the last backward, and stay from step to step, which is counted
elsewhere; with ZeRO 2 those leave that a backward may reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import add, mul
from typing import NamedTuple

from ..holding.buckets import Bucket, bucket_of, fill
from ..holding.holdings import Holdings
from ..layout import Layout

# Which gradients an action makes, by whether the second half of a backward would make them.
MADE = {"B": (False, True), "I": (False,), "W": (True,)}
ANY = -1  # block, of what is tied
PARTS = COMES, TAKEN, LATER = range(3)  # of the time from a gradient to the next: as `made` has it
Slot = tuple[int, int, int]  # of a parameter: its axis, which of the buckets, and its place there
# Bytes that are filled, that come whole, and of each axis all that comes in shards, and of shards.
Numbers = tuple[float, ...]
NOTHING: Numbers = (0.0,) * 7


class Filled(NamedTuple):
    """Buckets while one action runs, beside what is there before it: a row for each moment.

    Attributes:
        blocks: Which block of the chunk runs, from the last; one more at the end.
        names: Whose gradient is the latest of the block; "" before the first, and at the end.
        parts: Whether that is when it comes, has been taken over, or later: of `PARTS`.
        bytes: As `Numbers`; of `gathered` it is one number.
    """

    blocks: tuple[int, ...]
    names: tuple[str, ...]
    parts: tuple[int, ...]
    bytes: tuple[Numbers, ...]


@dataclass(slots=True)
class _Moments:
    """What is there now, and at each moment so far."""

    now: Numbers = NOTHING
    at: tuple[int, str, int] = 0, "", LATER
    each: list[tuple[int, str, int, Numbers]] = field(default_factory=list)

    def add(self, size: Numbers) -> None:
        """Have so much more."""
        self.now = tuple(map(add, self.now, size))
        self.each.append((*self.at, self.now))


@dataclass(slots=True)
class _Buckets:
    """Buckets that are summed over the same ranks: sizes, and how many gradients each waits for."""

    sizes: Sequence[tuple[Numbers, Numbers, Numbers]]  # filled, coming, and shards
    missing: list[int]
    total: _Moments
    left: int = 0  # how many have gone
    opened: set[int] = field(default_factory=set)
    under_way: int | None = None

    def come(self, bucket: int, *, last: bool) -> None:
        """Take a gradient; `last`: of a parameter that gets no other in this action."""
        self.missing[bucket] -= last
        while self.left < len(self.sizes) and not self.missing[self.left]:
            self._leave()

    def finish(self) -> None:
        """Let the others go, and wait for all."""
        while self.left < len(self.sizes):
            self._leave()
        self._collect()

    def open(self, bucket: int) -> None:
        """Have memory for a gradient."""
        if bucket not in self.opened:
            self.opened.add(bucket)
            self.total.add(self.sizes[bucket][0])

    def _leave(self) -> None:
        self.open(self.left)
        self.total.add(self.sizes[self.left][1])
        self._collect()
        self.under_way = self.left
        self.left += 1

    def _collect(self) -> None:
        """Keep this rank's share alone of the one under way."""
        if self.under_way is not None:
            filled, coming, shard = self.sizes[self.under_way]
            self.total.add(shard)
            self.total.add(tuple([-a - b for a, b in zip(filled, coming, strict=True)]))


def filled(known: Holdings, layout: Layout, number: int, kind: str, chunk: int) -> Filled:
    """Follow an action that sums gradients.

    Args:
        known: Of the description.
        layout: With ZeRO 1 or 2.
        number: Of a rank, of `known.numbers(layout)`.
        kind: "B", or "I" or "W" for a half of a backward.
        chunk: Of the rank.
    """
    key = layout.grid.tp, layout.grid.ep, layout.grid.etp, number, kind, chunk, layout.zero == 2
    found: Filled | None = known.filled.get(key)
    if found is None:
        found = known.filled[key] = _followed(known, layout, number, kind, chunk)
    return found


def bytes_of(known: Holdings, layout: Layout, number: int, kind: str, chunk: int) -> list[float]:
    """Return the bytes at each of the moments that `filled` has."""
    grid = layout.grid
    ranks = grid.cp * grid.dp, grid.edp
    key = grid.tp, grid.ep, grid.etp, ranks, layout.zero, number, kind, chunk
    found: list[float] | None = known.filled.get(key)
    if found is None:
        whole = [float(n > 1) for n in ranks]
        shares = [1 / n for n in ranks]
        coming = [share * some for share, some in zip(shares, whole, strict=True)]
        weights = [float(layout.zero == 2), *whole, *coming, *shares]
        each = filled(known, layout, number, kind, chunk).bytes
        found = known.filled[key] = [sum(map(mul, own, weights)) for own in each]
    return found


def _followed(known: Holdings, layout: Layout, number: int, kind: str, chunk: int) -> Filled:
    total = _Moments()
    members, slots = _slots(known, layout, number)
    places: list[dict[int, int]] = []  # of those buckets that leave
    groups: list[_Buckets] = []
    for axis, all_ in enumerate(members):
        leaving = [at for at, b in enumerate(all_) if layout.zero < 2 or b.reached(chunk)]
        places.append({at: place for place, at in enumerate(leaving)})
        each_size = [_sizes(known, all_[at], axis) for at in leaving]
        groups.append(_Buckets(each_size, [len(all_[at].sizes) for at in leaving], total))
    each = [
        (at, [(name, slots.get((at, name)) or slots.get((ANY, name))) for name in names])
        for at, names in gradients_in(known, layout, number, kind, chunk)
    ]
    last = {slot: (at, name) for at, own in each for name, slot in own}
    for place, (at, own) in enumerate(each):
        total.at = place, "", LATER
        total.add(NOTHING)
        for name, slot in own:
            if slot is not None:
                axis, bucket = slot[0], places[slot[0]][slot[1]]
                for part in PARTS:
                    total.at = place, name.partition(".")[2], part
                    if part == COMES:
                        groups[axis].open(bucket)
                    elif part == TAKEN:
                        groups[axis].come(bucket, last=last[slot] == (at, name))
                total.add(NOTHING)
    total.at = len(each), "", LATER
    total.add(NOTHING)
    for group in groups:
        group.finish()
    return Filled(*zip(*total.each, strict=True))


def _sizes(known: Holdings, bucket: Bucket, axis: int) -> tuple[Numbers, Numbers, Numbers]:
    whole = float(bucket.elements * bucket.sum_item(known.optimizer))
    masters = float(bucket.elements * bucket.master_item(1))
    here = bucket.summed_here(known.optimizer)
    return (
        _placed(whole, 0),
        _placed(whole, axis + (1 if here else 3)),
        _placed(masters, axis + 5),
    )


def _placed(size: float, place: int) -> Numbers:
    return tuple(size if at == place else 0.0 for at in range(len(NOTHING)))


def gradients_in(
    known: Holdings, layout: Layout, number: int, kind: str, chunk: int
) -> Iterator[tuple[int, list[str]]]:
    """Yield the blocks of a chunk from the last: which of the rank, and whose gradients come."""
    behaviours, chunks = known.description.behaviours(layout.cut), known.content(number).chunks
    kinds = list(chain.from_iterable(chunks))
    start = sum(map(len, chunks[:chunk]))
    for at in reversed(range(start, start + len(chunks[chunk]))):
        own = behaviours[kinds[at]]
        late = {each.name: each.late for each in own.parameters}
        made = [name for name, *_ in own.made]
        # A tied one is told of where backward makes all of it: last, and here it is the first.
        order = [*(name for name in reversed(late) if name not in made), *made]
        yield at, [f"{kinds[at]}.{name}" for name in order if late.get(name) in MADE[kind]]


Slots = tuple[tuple[list[Bucket], list[Bucket]], dict[tuple[int, str], Slot]]


def _slots(known: Holdings, layout: Layout, number: int) -> Slots:
    """Return the buckets of both axes, and where gradients go, by block of the rank and name."""
    grid = layout.grid
    key = grid.tp, grid.ep, grid.etp, number
    found: Slots | None = known.slots.get(key)
    if found is None:
        found = known.slots[key] = _read_slots(known, layout, number)
    return found


def _read_slots(known: Holdings, layout: Layout, number: int) -> Slots:
    slots: dict[tuple[int, str], Slot] = {}
    alike = known.of_blocks(layout, number)
    blocks = [held for held, times, _ in alike for _ in range(times)]
    found: list[list[Bucket]] = []
    for axis, expert in enumerate((False, True)):
        shared = [(p, at) for at, held in enumerate(blocks) for p in held
                  if p.expert is expert and not p.others]  # fmt: skip
        order = shared[::-1]
        numbered = [p._replace(chunk=number) for number, (p, _) in enumerate(order)]
        members = fill(numbered, known.optimizer.bucket_size)
        found.append([])
        for place, own in enumerate(members):
            each = [order[p.chunk] for p in own]
            found[axis].append(bucket_of([held for held, _ in each], sharded=True))
            for inside, (held, at) in enumerate(each):
                slots[at, held.name] = slot = axis, place, inside
                for names in known.description.tied:
                    if held.name in names:
                        slots |= dict.fromkeys(((ANY, name) for name in names), slot)
    return (found[0], found[1]), slots
