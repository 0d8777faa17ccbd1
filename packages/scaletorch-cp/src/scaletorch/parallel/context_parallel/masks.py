"""Masks: the positions that see each other, and the blocks of visible pairs between two shards.

A shard is a few runs of positions with one step. Between two such runs the visible pairs are a
band in local indices too; a document narrows both runs to its own positions. A block is a
rectangle of local rows and keys in which row i sees key j if `lower <= j - i <= upper`, counted
within the block. All fused kernels know two bands: FULL, and CAUSAL on squares. A band without a
lower bound is divided into a few of those. A lower bound is the far edge of a sliding window: such
a block stays whole, for kernels that take any window.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple, TypeAlias

from torch import Tensor

from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank

CU_SEQLENS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")  # entries of a batch: documents

Documents = tuple[int, ...]  # their first positions, and the length: (0, a, ..., length)
Band: TypeAlias = tuple[int | None, int | None]  # lower and upper; None is no bound

FULL: Band = (None, None)
CAUSAL: Band = (None, 0)  # of square blocks


class Block(NamedTuple):
    """A rectangle of pairs: local rows, local keys, and the visible band."""

    rows: slice
    keys: slice
    band: Band


@dataclass(frozen=True, slots=True)
class Mask:
    """The keys j that a query at position i sees: those that pass every test.

    Raises:
        InvalidArgumentError: A window below 1, or documents that do not ascend from 0.
    """

    causal: bool  # only keys with j <= i
    window: int | None = None  # only i - j < window, and j - i < window if not causal
    documents: Documents | None = None  # a row sees keys of its own document; None is one document

    def __post_init__(self) -> None:
        window = self.window
        if window is not None and (not isinstance(window, int) or window is True or window < 1):
            raise InvalidArgumentError(
                "window must be at least 1, an integer (1 sees its own position only), or None "
                f"for no window; it is {window!r}"
            )
        if self.documents is not None:
            _require_ascending(self.documents)


def _require_ascending(documents: Documents) -> None:
    if len(documents) < 2 or documents[0] != 0:
        raise InvalidArgumentError(
            "documents must be their first positions and the length, (0, a, ..., length); "
            f"they begin {documents[:3]}"
        )
    for index, (start, stop) in enumerate(pairwise(documents)):
        if start > stop:
            raise InvalidArgumentError(
                f"documents must ascend; entry {index + 1}, {stop}, follows {start}"
            )


def read_documents(cu_seqlens: Sequence[int] | Tensor, length: int | None = None) -> Documents:
    """Return cumulative lengths of packed documents as integers from 0 to `length`, if known."""
    values = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    try:
        documents = tuple(map(operator.index, values))
    except TypeError as error:
        raise InvalidArgumentError(
            f"{describe_rank()}: cu_seqlens must be integers (0, a, ..., length): {error}"
        ) from error
    _require_ascending(documents)
    if length not in (None, documents[-1]):
        raise InvalidArgumentError(
            f"{describe_rank()}: cu_seqlens must end with the length of the sequences, {length}; "
            f"it ends with {documents[-1]}"
        )
    return documents


def chunk_documents(documents: Documents, size: int) -> Documents:
    """Divide documents into chunks of `size` positions, for chunked attention."""
    starts = chain.from_iterable(range(*ends, size) for ends in pairwise(documents))
    return (*starts, documents[-1])


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


def blocks(mask: Mask, rows: Sequence[range], keys: Sequence[range], length: int) -> list[Block]:
    """Return the blocks of visible pairs between the queries of one shard and the keys of another.

    Each visible pair is in exactly one block; there are at most three blocks for each pair of runs
    and each document that both hold. `rows` and `keys` are runs of positions of one step, in local
    order. Positions from `length` on are padding: they see no position, and none sees them.
    """
    steps = {run.step for run in (*rows, *keys)}
    if len(steps) > 1 or min(steps, default=1) < 1:
        raise InvalidArgumentError(
            "rows and keys must be runs of one step, ascending, as in shards of one layout; "
            f"their steps are {sorted(steps)}"
        )
    documents = (0, length) if mask.documents is None else mask.documents
    far = None if mask.window is None else mask.window - 1
    band = None if far is None else -far, 0 if mask.causal else far
    row_runs, key_runs = _runs(rows, length), _runs(keys, length)
    return [
        block
        for row_run in row_runs
        for key_run in key_runs
        for whole in _blocks_of_runs(band, documents, row_run, key_run)
        for block in _split(whole)
    ]


def _runs(shard: Sequence[range], length: int) -> list[_Run]:
    """Return a shard's runs without padding; runs adjacent in position and in memory are merged."""
    runs: list[_Run] = []
    index = 0
    for whole in shard:
        positions = whole[: _count_below(whole, length)]
        if positions:
            last = runs[-1] if runs else None
            if last is not None and last.positions[-1] + whole.step == positions.start:
                positions = range(last.positions.start, positions.stop, whole.step)
                runs[-1] = _Run(last.top, positions)
            else:
                runs.append(_Run(index, positions))
        index += len(whole)
    return runs


def _blocks_of_runs(band: Band, documents: Documents, rows: _Run, keys: _Run) -> Iterator[Block]:
    """Yield the undivided blocks between two runs, document by document, with local bands."""
    first = bisect_right(documents, max(rows.positions.start, keys.positions.start)) - 1
    last = bisect_right(documents, min(rows.positions[-1], keys.positions[-1])) - 1
    for ends in pairwise(documents[first : last + 2]):
        row_run, key_run = rows.within(*ends), keys.within(*ends)
        if row_run.positions and key_run.positions:
            shift, step = key_run.positions.start - row_run.positions.start, rows.positions.step
            lower = None if band[0] is None else -((shift - band[0]) // step)
            upper = None if band[1] is None else (band[1] - shift) // step
            yield Block(row_run.local, key_run.local, (lower, upper))


def _count_below(run: range, position: int) -> int:
    """Return the number of positions of a run below `position`."""
    return min(max(-((run.start - position) // run.step), 0), len(run))


def visible_rows(band: Band, rows: int, keys: int) -> range:
    """Return the rows of a block that see a key; the other rows are at its ends."""
    lower, upper = band
    if not keys or (lower is not None and upper is not None and lower > upper):
        return range(0)
    first = 0 if upper is None else max(0, -upper)
    end = rows if lower is None else min(rows, keys - lower)
    return range(first, max(first, end))


def visible_keys(band: Band, rows: range, keys: int) -> range:
    """Return the keys from the first to the last that any of these visible rows sees."""
    lower, upper = band
    left = 0 if lower is None else max(0, rows.start + lower)
    return range(left, keys if upper is None else min(keys, rows.stop + upper))


def _split(block: Block) -> Iterator[Block]:
    """Divide a block into at most three FULL ones and CAUSAL squares, or leave a window whole."""
    height, width = block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
    rows = visible_rows(block.band, height, width)
    if not rows:
        return
    (block,) = _sub_block(block, rows, visible_keys(block.band, rows, width))
    height, width = block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
    lower, upper = block.band
    if lower is not None or upper is None:
        yield block
        return
    side = width - upper
    yield from _sub_block(block, range(side), range(upper))
    yield from _sub_block(block, range(side), range(upper, width))
    yield from _sub_block(block, range(side, height), range(width))


def _sub_block(block: Block, rows: range, keys: range) -> Iterator[Block]:
    """Yield a block's rectangle unless it is empty; bounds that do not cut it become None."""
    if not rows or not keys:
        return
    (lower, upper), shift = block.band, rows.start - keys.start
    lower = None if lower is None or lower + shift <= 1 - len(rows) else lower + shift
    upper = None if upper is None or upper + shift >= len(keys) - 1 else upper + shift
    top, left = block.rows.start, block.keys.start
    yield Block(
        slice(top + rows.start, top + rows.stop),
        slice(left + keys.start, left + keys.stop),
        (lower, upper),
    )
