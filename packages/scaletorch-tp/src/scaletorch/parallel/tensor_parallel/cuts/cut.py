"""How a length is divided over ranks, and which numbers of ranks would do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....dist.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Cut:
    """A length cut into parts, and the part that each rank has.

    Args:
        parts: Length of each part, in order.
        ranks: Index of each rank's part, ascending; ranks of one part are replicas.
    """

    parts: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def whole(self) -> int:
        """The length that was cut."""
        return sum(self.parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Length of each rank's part."""
        return tuple(self.parts[part] for part in self.ranks)

    @property
    def replicated(self) -> bool:
        """Whether several ranks have one part."""
        return len(self.parts) < len(self.ranks)

    @property
    def in_order(self) -> bool:
        """Whether the ranks' parts, one after another, are the whole as it is."""
        return not self.replicated

    @property
    def packed(self) -> tuple[Cut, ...]:
        """How each of several packed lengths is cut; this cut itself if there is one length."""
        return (self,)

    @property
    def owners(self) -> tuple[int, ...]:
        """The first rank that has each part."""
        return tuple(self.ranks.index(part) for part in range(len(self.parts)))

    def start(self, rank: int) -> int:
        """Return where the part of `rank` begins."""
        return sum(self.parts[: self.ranks[rank]])

    def ranges(self, rank: int) -> tuple[range, ...]:
        """Return which indices of the whole `rank` has, in the order of its part."""
        start = self.start(rank)
        return (range(start, start + self.sizes[rank]),)

    def times(self, length: int) -> Cut:
        """Return the cut of as many units of `length`, which stay whole."""
        return Cut(tuple(part * length for part in self.parts), self.ranks)

    def take(self, full: Tensor, dim: int, rank: int) -> Tensor:
        """Return the view of `full` that is the part of `rank` along `dim`."""
        return full.narrow(dim, self.start(rank), self.parts[self.ranks[rank]])

    def arrange(self, joined: Tensor, dim: int) -> Tensor:
        """Return the whole, given all ranks' parts in their order."""
        if self.in_order:
            return joined
        pieces = joined.split(self.sizes, dim)
        return torch.cat([pieces[rank] for rank in self.owners], dim)


def shard_sizes(length: int, size: int) -> tuple[int, ...]:
    """Return each rank's share of `length`: equal, or one more on the first ranks."""
    share, longer = divmod(length, size)
    return tuple(share + (rank < longer) for rank in range(size))


def share_cut(length: int, size: int) -> Cut:
    """Cut `length` into a share for each rank."""
    return Cut(shard_sizes(length, size), tuple(range(size)))


def head_cuts(query: int, key_value: int, size: int) -> tuple[Cut, Cut]:
    """Cut query and key/value heads, so that each rank has the latter that its queries use.

    On every rank the query heads are a multiple of the key/value heads and use them in the same
    grouping as in the whole. Fewer key/value heads than ranks are replicated: each rank has one.

    Args:
        query: Number of query heads, a multiple of `key_value` and at least `size`.
        key_value: Number of key/value heads.
        size: Number of ranks.
    """
    groups = query // key_value
    if key_value >= size:
        key_values = share_cut(key_value, size)
        return key_values.times(groups), key_values
    replicas = shard_sizes(size, key_value)
    parts = tuple(share for number in replicas for share in shard_sizes(groups, number))
    ranks = tuple(head for head, number in enumerate(replicas) for _ in range(number))
    return Cut(parts, tuple(range(size))), Cut((1,) * key_value, ranks)


def nearest_divisors(length: int, size: int, most: int | None = None) -> tuple[int, ...]:
    """Return the divisors of `length` next to `size`: below, itself, above, if there are any.

    None is above `most`.
    """
    limit = length if most is None else min(length, most)
    divisors = [d for d in range(1, limit + 1) if length % d == 0]
    below = [d for d in divisors if d < size][-1:]
    same = [d for d in divisors if d == size]
    above = [d for d in divisors if d > size][:1]
    return (*below, *same, *above)


def legal_sizes(length: int, size: int, most: int | None = None) -> str:
    """Return a text that names the tensor-parallel sizes near `size` that fit."""
    numbers = [str(d) for d in nearest_divisors(length, size, most)]
    return f"the nearest legal tp sizes are {' and '.join(numbers)}" if numbers else "none is legal"


def require_shares(what: str, length: int, size: int) -> None:
    """Refuse a length that leaves a rank with nothing.

    Raises:
        InvalidArgumentError: `length` is less than `size`.
    """
    if length < size:
        raise InvalidArgumentError(
            f"{what} = {length} has no share for each of tp = {size} ranks; "
            f"tp sizes up to {length} are legal"
        )
