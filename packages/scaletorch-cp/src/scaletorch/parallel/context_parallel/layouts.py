"""Sequence layouts as data: the positions of a sequence that each rank holds.

A rank's shard is a few runs of positions, in local order. All runs of a layout have the same step
and all ranks hold the same number of positions. A length that does not divide is padded at the end:
positions at or beyond the length are padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of a sequence on each rank; built by `contiguous`, `zigzag` and `stripe`."""

    name: str  # in `LAYOUTS`
    length: int  # of the whole sequence, without padding
    ranks: tuple[tuple[range, ...], ...]  # each rank's runs of positions, in local order

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def local_length(self) -> int:
        """The number of positions on every rank, padding included."""
        return sum(map(len, self.ranks[0]))

    @property
    def padded_length(self) -> int:
        """The length of the whole sequence with its padding, `size * local_length`."""
        return self.size * self.local_length

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Return the positions of a rank, by its index in the ring, int64 [local_length].

        They index the rank's shard in the padded sequence, in local order.

        Raises:
            InvalidArgumentError: No such rank.
        """
        if not 0 <= rank < self.size:  # -1 is the rank of a process outside of its group
            raise InvalidArgumentError(
                f"a {self.name} layout of {self.size} ranks has no rank {rank}"
            )
        return _indices(self.ranks[rank], device)

    def order(self, device: torch.device | str | None = None) -> Tensor:
        """Return the index that joins the ranks' shards to the whole sequence, int64 [length].

        `torch.cat(shards).index_select(0, order)` is the whole sequence without padding.
        """
        held = _indices(chain.from_iterable(self.ranks), device)
        return held.argsort()[: self.length]


def contiguous(length: int, size: int) -> Layout:
    """Give rank r the r-th of `size` equal chunks: balanced for full attention.

    `length` is padded to a multiple of `size`, the number of ranks. Both are at least 1.
    """
    return Layout("contiguous", length, tuple((each,) for each in _chunks(length, size, size)))


def zigzag(length: int, size: int) -> Layout:
    """Give rank r the chunks r and 2N − 1 − r of 2N equal chunks: balanced for causal attention.

    `length` is padded to a multiple of 2N for N = `size` ranks, except for one rank.
    """
    if size == 1:
        return replace(contiguous(length, 1), name="zigzag")
    chunks = _chunks(length, size, 2 * size)
    return Layout("zigzag", length, tuple(zip(chunks[:size], reversed(chunks), strict=False)))


def stripe(length: int, size: int) -> Layout:
    """Give rank r the positions r, r + N, r + 2N, …: nearly balanced for most masks.

    `length` is padded to a multiple of `size`, the number of ranks N.
    """
    padded = _chunks(length, size, size)[-1].stop
    return Layout("stripe", length, tuple((range(rank, padded, size),) for rank in range(size)))


LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "stripe": stripe,
}


def layout_for_length(layout: Layout | str, length: int, size: int) -> Layout:
    """Return the layout of a whole sequence whose `length` already includes the padding.

    Raises:
        InvalidArgumentError: No such name, or a length that does not divide or does not fit.
    """
    name = layout.name if isinstance(layout, Layout) else layout
    unit = named_layout(name, 1, size).padded_length
    if length % unit:
        near = [n * unit for n in (length // unit, length // unit + 1) if n]
        raise InvalidArgumentError(
            f"{describe_rank()}: a sequence of {length} positions does not divide over "
            f"{size} context-parallel ranks in a {name} layout; lengths near it that do: "
            f"{' and '.join(map(str, near))}"
        )
    return layout_for_shards(layout, length // size, None, size)


def layout_for_shards(layout: Layout | str, shard: int, length: int | None, size: int) -> Layout:
    """Return the layout under which each of `size` ranks holds `shard` positions with padding.

    `length` is that of the whole sequence without padding; by default that of the given layout, or
    for a name all positions of the ranks.
    """
    total = shard * size if length is None else length
    found = layout if isinstance(layout, Layout) else named_layout(layout, total, size)
    whole = found.length if length is None else length
    if (found.size, found.local_length, found.length) != (size, shard, whole):
        raise InvalidArgumentError(
            f"{describe_rank()}: a {found.name} layout of {found.length} positions gives each of "
            f"{found.size} ranks {found.local_length}, {found.padded_length} with padding; each of "
            f"{size} ranks has {shard}, of {whole} positions together"
        )
    return found


def named_layout(name: str, length: int, size: int) -> Layout:
    """Return the layout of that name, padded if necessary."""
    require_name(name)
    return LAYOUTS[name](length, size)


def require_name(name: str) -> None:
    """Refuse a name that is not in `LAYOUTS`."""
    if not isinstance(name, str) or name not in LAYOUTS:
        raise InvalidArgumentError(
            f"layout must be a Layout or one of {', '.join(LAYOUTS)}; it is {name!r}"
        )


def merge_ranks(layout: Layout, size: int) -> Layout:
    """Return the layout of groups that hold the shards of `size` neighbouring ranks together."""
    firsts = range(0, layout.size, size)
    groups = (chain(*layout.ranks[first : first + size]) for first in firsts)
    return Layout(layout.name, layout.length, tuple(map(_merge_runs, groups)))


def _merge_runs(runs: Iterable[range]) -> tuple[range, ...]:
    """Return the runs in ascending order; the stripes of all ranks become one run."""
    runs = sorted(runs, key=lambda run: run.start)
    if runs[0].step == len(runs):
        return (range(runs[0].start, runs[0].start + sum(map(len, runs))),)
    return tuple(runs)


def _chunks(length: int, size: int, count: int) -> list[range]:
    """Return `count` equal chunks that hold `length` positions and their padding."""
    if length < 1 or size < 1:
        raise InvalidArgumentError(
            "a layout needs a length and a number of ranks of at least 1; "
            f"it got length {length} and {size} ranks"
        )
    chunk = -(-length // count)
    return [range(start, start + chunk) for start in range(0, count * chunk, chunk)]


def _indices(runs: Iterable[range], device: torch.device | str | None) -> Tensor:
    return torch.cat([torch.arange(r.start, r.stop, r.step, device=device) for r in runs])
