"""The division of a length among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """The index ranges of a length that each rank holds.

    A rank holds one range, or one range of each of several packed lengths, such as
    [query | key | value]. Ranks that hold the same range are replicas.

    Args:
        ranges: Each rank's ranges, in the order of its shard; every rank has the same number.
    """

    ranges: tuple[tuple[range, ...], ...]

    @classmethod
    def of(cls, lengths: Sequence[int], ranks: Sequence[int] | None = None) -> Cut:
        """Cut a length into consecutive slices.

        Args:
            lengths: Length of each slice, in order.
            ranks: Index of each rank's slice, ascending; None gives rank i slice i.
        """
        ends = [0, *accumulate(lengths)]
        places = range(len(lengths)) if ranks is None else ranks
        return cls(tuple((range(ends[place], ends[place + 1]),) for place in places))

    @property
    def whole(self) -> int:
        """The full length."""
        return max(piece.stop for held in self.ranges for piece in held)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Length of each rank's shard."""
        return tuple(sum(map(len, held)) for held in self.ranges)

    @property
    def replicated(self) -> bool:
        """True if several ranks hold the same range."""
        return bool(self.shared)

    @property
    def shared(self) -> dict[int, tuple[range, ...]]:
        """Position in a shard -> its distinct ranges, for positions that some ranks replicate."""
        places = enumerate(zip(*self.ranges, strict=True))
        distinct = {place: tuple(dict.fromkeys(ranges)) for place, ranges in places}
        return {place: r for place, r in distinct.items() if len(r) < len(self.ranges)}

    @property
    def in_order(self) -> bool:
        """True if the ranks' shards, concatenated in order, are the full length."""
        pieces = [*chain.from_iterable(self.ranges)]
        return all(b.start == a.stop for a, b in pairwise(pieces))

    def start(self, rank: int) -> int:
        """Return the start of the first range of `rank`."""
        return self.ranges[rank][0].start

    def owners(self, rank: int) -> tuple[int, ...]:
        """Return, for each range of `rank`, the first rank that holds it."""
        places = zip(*self.ranges, strict=True)
        return tuple(held.index(held[rank]) for held in places)

    def times(self, length: int) -> Cut:
        """Return the cut scaled by `length`: every index becomes a block that stays whole."""
        scaled = (
            tuple(range(r.start * length, r.stop * length) for r in held) for held in self.ranges
        )
        return Cut(tuple(scaled))

    def take(self, full: Tensor, dim: int, rank: int) -> Tensor:
        """Return the shard of `rank`: a view of `full`, or a copy if it has several ranges."""
        pieces = [full.narrow(dim, piece.start, len(piece)) for piece in self.ranges[rank]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def arrange(self, joined: Tensor, dim: int) -> Tensor:
        """Return the full tensor, given all ranks' shards concatenated in rank order."""
        if self.in_order:
            return joined
        pieces = [*chain.from_iterable(self.ranges)]
        held: dict[tuple[int, int], Tensor] = {}  # the first replica of each range
        for piece, tensor in zip(pieces, joined.split([*map(len, pieces)], dim), strict=True):
            held.setdefault((piece.start, piece.stop), tensor)
        return torch.cat([tensor for _, tensor in sorted(held.items(), key=lambda e: e[0])], dim)


def shard_sizes(length: int, size: int) -> tuple[int, ...]:
    """Return each rank's shard size; if uneven, the first ranks get one more."""
    share, longer = divmod(length, size)
    return tuple(share + (rank < longer) for rank in range(size))


def share_cut(length: int, size: int) -> Cut:
    """Return the cut of `length` into one shard for each of `size` ranks."""
    return Cut.of(shard_sizes(length, size))


def fuse(cuts: Sequence[Cut]) -> Cut:
    """Return the cut of several packed lengths, given the cut of each."""
    starts = accumulate((cut.whole for cut in cuts), initial=0)
    moved = [
        [[range(start + r.start, start + r.stop) for r in held] for held in cut.ranges]
        for start, cut in zip(starts, cuts, strict=False)
    ]
    return Cut(tuple(tuple(chain.from_iterable(held)) for held in zip(*moved, strict=True)))
