"""Masks: the positions that see each other, and the blocks of visible pairs between two shards.

A shard is a few runs of positions with one step. Between two such runs the visible pairs are a
band in local indices too, which `split` divides into blocks; a document narrows both runs to its
own positions.

Time grows with pairs of runs × log(documents), for a search in each pair, and with the documents
that both runs of a pair reach into: at most one for two different chunks, and those of the chunk
for a chunk with itself. So a rank pays for the documents that it holds, about 10 µs each, not for
pairs of documents. With stripes every rank holds a piece of nearly every document, for each of
the N ranks whose keys it sees.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ....dist.errors import InvalidArgumentError
from ..layouts.layout import Layout
from .blocks import CAUSAL, FULL, Band, Block, count_pairs, split

__all__ = ["CAUSAL", "FULL", "Band", "Block", "Mask", "blocks", "visible_pairs"]


@dataclass(frozen=True, slots=True)
class Mask:
    """The keys j that a query at position i sees: those that pass every test.

    Attributes:
        causal: Only keys with j <= i.
        window: Only keys with i - j < window, and j - i < window if not causal; None is no window.
        documents: First positions of the documents, and the length: (0, a, …, length). A row sees
            keys of its own document; None is one document.

    Raises:
        InvalidArgumentError: A window below 1, or documents that do not ascend from 0.
    """

    causal: bool
    window: int | None = None
    documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        window = self.window
        if window is not None and (not isinstance(window, int) or window is True or window < 1):
            message = (
                "window must be at least 1, an integer (1 sees its own position only), or None "
                f"for no window; it is {window!r}"
            )
            raise InvalidArgumentError(message)
        if self.documents is not None:
            _require_ascending(self.documents)

    @property
    def band(self) -> Band:
        """The lowest and the highest visible j - i within a document."""
        far = None if self.window is None else self.window - 1
        return None if far is None else -far, 0 if self.causal else far


class _Run(NamedTuple):
    """Positions of one step that are adjacent in a shard, from local index `top` on."""

    top: int
    positions: range

    @property
    def local(self) -> slice:
        """The run's local indices."""
        return slice(self.top, self.top + len(self.positions))

    def within(self, start: int, stop: int) -> _Run:
        """Return the run's positions from `start` up to `stop`."""
        first, end = _count_below(self.positions, start), _count_below(self.positions, stop)
        return _Run(self.top + first, self.positions[first:end])

    def continues_in(self, other: _Run) -> bool:
        """Return whether another run's positions and local indices follow on this one's."""
        after = self.positions[-1] + self.positions.step
        return self.local.stop == other.top and other.positions.start == after


def blocks(mask: Mask, rows: Sequence[range], keys: Sequence[range], length: int) -> list[Block]:
    """Return the blocks of visible pairs between the queries of one shard and the keys of another.

    Each visible pair is in exactly one block. There are at most three blocks for each pair of runs
    and each document that both hold.

    Args:
        mask: The visible pairs of positions.
        rows: Positions of the local queries, in local order; runs of one step.
        keys: Positions of the local keys, in local order; runs of the same step.
        length: Length of the whole sequence. Positions from there on are padding, which sees
            nothing and is seen by nothing.

    Raises:
        InvalidArgumentError: Runs of unequal steps, or documents that do not end at `length`.
    """
    steps = {run.step for run in (*rows, *keys)}
    if len(steps) > 1 or min(steps, default=1) < 1:
        message = (
            "rows and keys must be runs of one step, ascending, as in shards of one layout; "
            f"their steps are {sorted(steps)}"
        )
        raise InvalidArgumentError(message)
    documents = (0, length) if mask.documents is None else mask.documents
    if documents[-1] != length:
        message = (
            f"documents must end at the sequence's length, {length}; they end at {documents[-1]}"
        )
        raise InvalidArgumentError(message)
    row_runs, key_runs = _runs(rows, length), _runs(keys, length)
    return [
        block
        for row_run in row_runs
        for key_run in key_runs
        for whole in _blocks_of_runs(mask.band, documents, row_run, key_run)
        for block in split(whole)
    ]


def visible_pairs(mask: Mask, layout: Layout) -> tuple[int, ...]:
    """Return the number of visible pairs of each rank's rows, over the keys of all ranks.

    Raises:
        InvalidArgumentError: Documents that do not end at the layout's length.
    """
    keys = [run for shard in layout.ranks for run in shard]
    return tuple(count_pairs(blocks(mask, rows, keys, layout.length)) for rows in layout.ranks)


def _runs(shard: Sequence[range], length: int) -> list[_Run]:
    """Return a shard's runs without padding; runs adjacent in position and in memory are merged."""
    runs: list[_Run] = []
    index = 0
    for whole in shard:
        run = _Run(index, whole[: _count_below(whole, length)])
        if runs and run.positions and runs[-1].continues_in(run):
            last = runs.pop()
            run = _Run(last.top, range(last.positions.start, run.positions.stop, whole.step))
        if run.positions:
            runs.append(run)
        index += len(whole)
    return runs


def _blocks_of_runs(
    band: Band, documents: tuple[int, ...], rows: _Run, keys: _Run
) -> Iterator[Block]:
    """Yield the undivided blocks between two runs, document by document."""
    first = bisect_right(documents, max(rows.positions.start, keys.positions.start)) - 1
    last = bisect_right(documents, min(rows.positions[-1], keys.positions[-1])) - 1
    for ends in pairwise(documents[first : last + 2]):
        row_run, key_run = rows.within(*ends), keys.within(*ends)
        if row_run.positions and key_run.positions:
            shift = key_run.positions.start - row_run.positions.start
            local = _local_band(band, shift, rows.positions.step)
            yield Block(row_run.local, key_run.local, local)


def _local_band(band: Band, shift: int, step: int) -> Band:
    """Return a band of positions as one of local indices; key 0 lies `shift` after row 0."""
    lower, upper = band
    return (
        None if lower is None else -((shift - lower) // step),
        None if upper is None else (upper - shift) // step,
    )


def _count_below(run: range, position: int) -> int:
    """Return the number of positions of a run below `position`."""
    return min(max(-((run.start - position) // run.step), 0), len(run))


def _require_ascending(documents: tuple[int, ...]) -> None:
    if len(documents) < 2 or documents[0] != 0:
        message = (
            "documents must be their first positions and the length, (0, a, ..., length); "
            f"they begin {documents[:3]}"
        )
        raise InvalidArgumentError(message)
    for index, (start, stop) in enumerate(pairwise(documents)):
        if start > stop:
            message = f"documents must ascend; entry {index + 1}, {stop}, follows {start}"
            raise InvalidArgumentError(message)
