"""Layouts: which positions of a sequence each rank holds, as data.

A rank's shard is a few runs of positions in the order in which it holds them. All runs of a
layout have one step, and all ranks hold equally many positions, so lengths that do not divide
are padded at the end: positions from the length on are padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank


@dataclass(frozen=True, slots=True)
class Layout:
    """Who holds which positions of a sequence; made by `contiguous`, `zigzag` and `stripe`.

    Attributes:
        name: The layout's name in `LAYOUTS`.
        length: Length of the whole sequence, without padding.
        ranks: Each rank's runs of positions, in local order.
    """

    name: str
    length: int
    ranks: tuple[tuple[range, ...], ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def local_length(self) -> int:
        """The number of positions that every rank holds, padding included."""
        return sum(map(len, self.ranks[0]))

    @property
    def padded_length(self) -> int:
        """The length of the whole sequence with its padding, `size * local_length`."""
        return self.size * self.local_length

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Return the positions that a rank holds, int64 [local_length], in local order.

        They are also the index that takes the rank's shard out of the padded whole.

        Args:
            rank: Index of the rank in its ring.
            device: Where to put the result.

        Raises:
            InvalidArgumentError: No such rank.
        """
        if not 0 <= rank < self.size:
            message = f"a {self.name} layout of {self.size} ranks has no rank {rank}"
            raise InvalidArgumentError(message)
        return _indices(self.ranks[rank], device)

    def padding(self, rank: int) -> int:
        """Return how many of a rank's positions are padding.

        Raises:
            InvalidArgumentError: No such rank.
        """
        return int((self.positions(rank) >= self.length).sum())

    def order(self, device: torch.device | str | None = None) -> Tensor:
        """Return the index that joins the ranks' shards to the whole, int64 [length].

        Entry i is where position i lies in the shards put together in rank order,
        so `torch.cat(shards).index_select(0, order)` is the whole without padding.
        """
        held = _indices((run for shard in self.ranks for run in shard), device)
        return held.argsort()[: self.length]


def contiguous(length: int, size: int) -> Layout:
    """Give rank r the r-th of `size` equal parts: balanced if every row sees every key.

    Args:
        length: Length of the whole sequence; padded to a multiple of `size`.
        size: The number of ranks.

    Raises:
        InvalidArgumentError: A length or size below 1.
    """
    part = _divided(length, size, size)
    ranks = tuple((range(rank * part, (rank + 1) * part),) for rank in range(size))
    return Layout("contiguous", length, ranks)


def zigzag(length: int, size: int) -> Layout:
    """Give rank r the chunks r and 2N − 1 − r of 2N equal chunks: balanced for causal attention.

    Args:
        length: Length of the whole sequence; padded to a multiple of 2 * `size`, but for one rank.
        size: The number of ranks, N.

    Raises:
        InvalidArgumentError: A length or size below 1.
    """
    part = _divided(length, size, 2 * size)
    if size == 1:
        return Layout("zigzag", length, ((range(length),),))
    chunks = [range(chunk * part, (chunk + 1) * part) for chunk in range(2 * size)]
    return Layout("zigzag", length, tuple(zip(chunks[:size], reversed(chunks), strict=False)))


def stripe(length: int, size: int) -> Layout:
    """Give rank r the positions r, r + N, r + 2N, …: nearly balanced for most masks.

    Args:
        length: Length of the whole sequence; padded to a multiple of `size`.
        size: The number of ranks, N.

    Raises:
        InvalidArgumentError: A length or size below 1.
    """
    padded = _divided(length, size, size) * size
    return Layout("stripe", length, tuple((range(rank, padded, size),) for rank in range(size)))


LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "stripe": stripe,
}


def layout_of_whole(layout: Layout | str, length: int, size: int) -> Layout:
    """Return the layout of a whole sequence, which needs no padding any more.

    Args:
        layout: A layout, or a name of `LAYOUTS`.
        length: Length of the sequence, with the padding of a layout that has any.
        size: The number of ranks.

    Raises:
        InvalidArgumentError: No such name, or a length that does not divide or does not fit.
    """
    if isinstance(layout, Layout):
        fits = (layout.size, layout.padded_length) == (size, length)
        _require(fits, layout, f"the whole sequence has {length}, and the group {size} ranks")
        return layout
    found = named_layout(layout, length, size)
    if found.padded_length != length:
        unit = named_layout(layout, 1, size).padded_length
        near = [n * unit for n in (length // unit, length // unit + 1) if n]
        message = (
            f"{describe_rank()}: a sequence of {length} positions does not divide over "
            f"{size} context-parallel ranks in a {layout} layout; lengths near it that do: "
            f"{' and '.join(map(str, near))}"
        )
        raise InvalidArgumentError(message)
    return found


def layout_of_shards(layout: Layout | str, part: int, length: int | None, size: int) -> Layout:
    """Return the layout under which every rank holds `part` positions.

    Args:
        layout: A layout, or a name of `LAYOUTS`.
        part: How many positions a rank holds, padding included.
        length: Length of the whole sequence without padding; None is that of a layout given,
            and of a name all that the ranks hold.
        size: The number of ranks.

    Raises:
        InvalidArgumentError: No such name, or sizes that do not fit together.
    """
    if isinstance(layout, Layout):
        found = layout
    else:
        found = named_layout(layout, part * size if length is None else length, size)
    whole = found.length if length is None else length
    fits = (found.size, found.local_length, found.length) == (size, part, whole)
    _require(fits, found, f"each of {size} ranks has {part}, of {whole} positions together")
    return found


def named_layout(name: str, length: int, size: int) -> Layout:
    """Return the layout of that name, with the padding that it needs.

    Raises:
        InvalidArgumentError: No such name, or a negative length.
    """
    require_name(name)
    if length == 0:  # an empty sequence has empty shards
        return Layout(name, 0, ((range(0),),) * size)
    return LAYOUTS[name](length, size)


def _require(fits: bool, layout: Layout, came: str) -> None:
    if not fits:
        message = (
            f"{describe_rank()}: a {layout.name} layout of {layout.length} positions gives each of "
            f"{layout.size} ranks {layout.local_length}, {layout.padded_length} with padding; "
            f"{came}"
        )
        raise InvalidArgumentError(message)


def require_name(name: str) -> None:
    """Refuse a name that no layout has.

    Raises:
        InvalidArgumentError: It is none of `LAYOUTS`.
    """
    if not isinstance(name, str) or name not in LAYOUTS:
        message = f"layout must be a Layout or one of {', '.join(LAYOUTS)}; it is {name!r}"
        raise InvalidArgumentError(message)


def joined(layout: Layout, size: int) -> Layout:
    """Return the layout of groups: the shards of every `size` neighbouring ranks, put together.

    A group's runs ascend, so that those which adjoin are next to each other, and the stripes of
    all ranks are one run.

    Args:
        layout: The positions of each rank.
        size: Ranks of a group; it divides their number.
    """
    firsts = range(0, layout.size, size)
    groups = (chain(*layout.ranks[first : first + size]) for first in firsts)
    return Layout(layout.name, layout.length, tuple(map(_put_together, groups)))


def _put_together(runs: Iterable[range]) -> tuple[range, ...]:
    runs = sorted(runs, key=lambda run: run.start)
    step, positions = runs[0].step, sum(map(len, runs))
    if step == len(runs):
        return (range(runs[0].start, runs[0].start + positions),)
    return tuple(runs)


def _divided(length: int, size: int, parts: int) -> int:
    """Return the length of each of `parts` equal parts that hold `length` positions."""
    if length < 1 or size < 1:
        message = (
            "a layout needs a length and a number of ranks of at least 1; "
            f"it got length {length} and {size} ranks"
        )
        raise InvalidArgumentError(message)
    return -(-length // parts)


def _indices(runs: Iterable[range], device: torch.device | str | None) -> Tensor:
    return torch.cat([torch.arange(r.start, r.stop, r.step, device=device) for r in runs])
