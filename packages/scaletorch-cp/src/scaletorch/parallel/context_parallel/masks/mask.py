"""Masks: which positions see which, and the blocks of pairs that two shards have between them.

A shard is a few runs of positions of one step. Between two such runs, the pairs that see each
other are a band in local indices too, which `blocks` cuts into blocks; a document narrows both runs
to its own positions.

Time grows with pairs of runs × log(documents), for a search in each pair, and with the documents
that both runs of a pair reach into: one at most for two different chunks, those of the chunk for
a chunk with itself. So a rank pays for the documents that it holds, about 10 µs each, not for
pairs of documents; with stripes every rank holds a piece of nearly every document, for each of
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
from .blocks import CAUSAL, FULL, Band, Block, cut, pairs

__all__ = ["CAUSAL", "FULL", "Band", "Block", "Mask", "blocks", "seen"]


@dataclass(frozen=True, slots=True)
class Mask:
    """What a query at position i sees: keys j that pass every test.

    Attributes:
        causal: Only keys with j <= i.
        window: Only keys with i - j < window, and j - i < window if not causal; None is no window.
        documents: Where documents begin, and the length: (0, a, …, length). A row sees keys of
            its own document; None is one document.

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
                "window must be at least 1, an integer, which sees its own position alone, or None "
                f"for no window; it is {window!r}"
            )
            raise InvalidArgumentError(message)
        if self.documents is not None:
            _require_ascending(self.documents)

    @property
    def band(self) -> Band:
        """The lowest and the highest of j - i that is seen within a document."""
        far = None if self.window is None else self.window - 1
        return None if far is None else -far, 0 if self.causal else far


class _Run(NamedTuple):
    """Positions of one step that lie next to each other in a shard, from local index `top` on."""

    top: int
    positions: range

    @property
    def local(self) -> slice:
        """The run's local indices."""
        return slice(self.top, self.top + len(self.positions))

    def within(self, start: int, stop: int) -> _Run:
        """Return the part of the run from position `start` up to `stop`."""
        first, end = _count_below(self.positions, start), _count_below(self.positions, stop)
        return _Run(self.top + first, self.positions[first:end])

    def goes_on_in(self, other: _Run) -> bool:
        """Return whether another run's positions and local indices follow on this one's."""
        after = self.positions[-1] + self.positions.step
        return self.local.stop == other.top and other.positions.start == after


def blocks(mask: Mask, rows: Sequence[range], keys: Sequence[range], length: int) -> list[Block]:
    """Return the blocks of pairs that see each other between queries of one shard and keys.

    Each pair is in exactly one block. They are three at most for each pair of runs and each
    document that both hold.

    Args:
        mask: Who sees whom.
        rows: Positions of the local queries, in local order; runs of one step.
        keys: Positions of the local keys, in local order; runs of the same step.
        length: Length of the whole sequence; positions from there on are padding, which sees
            nothing and is seen by nothing.

    Raises:
        InvalidArgumentError: Runs of unequal steps, or documents that do not end at `length`.
    """
    _require_one_step(rows, keys)
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
        for whole in _between(mask.band, documents, row_run, key_run)
        for block in cut(whole)
    ]


def seen(mask: Mask, layout: Layout) -> tuple[int, ...]:
    """Return how many pairs the rows of each rank see, over the keys of all ranks.

    Raises:
        InvalidArgumentError: Documents that do not end at the layout's length.
    """
    keys = [run for shard in layout.ranks for run in shard]
    return tuple(pairs(blocks(mask, rows, keys, layout.length)) for rows in layout.ranks)


def _runs(shard: Sequence[range], length: int) -> list[_Run]:
    """Return a shard's runs without padding; those that adjoin in both senses become one."""
    runs: list[_Run] = []
    index = 0
    for whole in shard:
        run = _Run(index, whole[: _count_below(whole, length)])
        if runs and run.positions and runs[-1].goes_on_in(run):
            last = runs.pop()
            run = _Run(last.top, range(last.positions.start, run.positions.stop, whole.step))
        if run.positions:
            runs.append(run)
        index += len(whole)
    return runs


def _between(band: Band, documents: tuple[int, ...], rows: _Run, keys: _Run) -> Iterator[Block]:
    """Yield the blocks between two runs, document by document."""
    row_all, key_all = rows.positions, keys.positions
    first = bisect_right(documents, max(row_all.start, key_all.start)) - 1
    last = bisect_right(documents, min(row_all[-1], key_all[-1])) - 1
    for document in range(first, last + 1):
        ends = documents[document], documents[document + 1]
        row_part, key_part = rows.within(*ends), keys.within(*ends)
        if row_part.positions and key_part.positions:
            shift = key_part.positions.start - row_part.positions.start
            inner = _in_steps(band, shift, row_all.step)
            yield Block(row_part.local, key_part.local, inner)


def _in_steps(band: Band, shift: int, step: int) -> Band:
    """Return a band of positions as one of local indices, where key 0 lies `shift` after row 0."""
    lower, upper = band
    return (
        None if lower is None else -((shift - lower) // step),
        None if upper is None else (upper - shift) // step,
    )


def _count_below(run: range, position: int) -> int:
    """Return how many positions of a run are below `position`."""
    return min(max(-((run.start - position) // run.step), 0), len(run))


def _require_one_step(rows: Sequence[range], keys: Sequence[range]) -> None:
    steps = {run.step for run in (*rows, *keys)}
    if len(steps) > 1 or min(steps, default=1) < 1:
        message = (
            "rows and keys must be runs of one step, forward, as the shards of one layout are; "
            f"their steps are {sorted(steps)}"
        )
        raise InvalidArgumentError(message)


def _require_ascending(documents: tuple[int, ...]) -> None:
    if len(documents) < 2 or documents[0] != 0:
        message = (
            "documents must be where each begins and the length, (0, a, ..., length); "
            f"they begin {documents[:3]}"
        )
        raise InvalidArgumentError(message)
    for index, (start, stop) in enumerate(pairwise(documents)):
        if start > stop:
            message = f"documents must ascend; entry {index + 1}, {stop}, follows {start}"
            raise InvalidArgumentError(message)
