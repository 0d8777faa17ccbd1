"""This rank's micro-batches of a global batch: how they were cut, and how a model is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..dist.errors import InvalidArgumentError
from ..parallel.context_parallel import ShardedSequences
from ..parallel.context_parallel.building import CU_SEQLENS, DEFAULT, layout_for_length
from ..parallel.pg_manager import IGNORED, ProcessGroupManager
from .entries import (
    POSITIONS,
    TOKENS,
    Positions,
    RowDims,
    named_entries,
    read_row_dims,
    read_sequence_dims,
    require_all_told,
    row_count,
    sequence_shape,
)
from .forward import terms_of

Batch = Mapping[str, Tensor]


class Cut(NamedTuple):
    """The cut that made a micro-batch.

    Attributes:
        layout: Which columns each cp rank has.
        counted: Its `position_ids`, if it has any, were counted here, not given.
        whole: The global batch, or what of it this data-parallel rank has read.
        sequences: This rank's positions, and where packed documents begin; None if the dims of
            positions are not known.
        own: `whole` is what this data-parallel rank has read.
        row_dims: The dim of each entry that is rows; None if every micro-batch gets it whole.
        sequence_dims: The dims of positions, as the caller has named them.
    """

    layout: str
    counted: bool
    whole: Batch
    sequences: ShardedSequences | None
    own: bool = False
    row_dims: RowDims = MappingProxyType({})
    sequence_dims: RowDims = MappingProxyType({})


class MicroBatch(dict[str, Tensor]):
    """A mapping of tensors [b, L / cp] that remembers its `Cut`.

    Attributes:
        cut: How it was made.
        is_empty: It got no row of the batch: its one row is computed and counts in no loss.
    """

    def __init__(self, entries: Batch, cut: Cut, *, is_empty: bool = False) -> None:
        super().__init__(entries)
        self.cut, self.is_empty = cut, is_empty


class Called(dict[str, Tensor]):
    """The entries that a model is called with.

    Attributes:
        micro_batch: What they were made of.
        count: How much of it counts in the loss, if this rank computes that.
    """

    def __init__(self, entries: Batch, micro_batch: Batch) -> None:
        super().__init__(entries)
        self.micro_batch = micro_batch
        self.count: float | Tensor = 0.0


def shard_global_batch(
    batch: Any,
    num_micro_batches: int,
    manager: ProcessGroupManager | None = None,
    *,
    model: nn.Module | None = None,
    cp_layout: str | None = None,
    own_rows: bool = False,
    row_dims: RowDims | None = None,
    sequence_dims: RowDims | None = None,
) -> list[Batch]:
    """Return this rank's micro-batches of a global batch.

    Args:
        batch: The same on every rank: a mapping, a dataclass, or with a model a tuple of what its
            forward takes. Rows are dim 0 of every entry, [B, ...]. Numbers, tensors of dim 0 of
            size 1, and the starts of packed documents `cu_seq_lens_q` (0, a, ..., L) are passed
            whole to every micro-batch. Entries named `loss_...` are for a loss of your own alone.
            Models of tokens have `input_ids` [B, L]; `labels` [B, L] aligned with them, -100 for
            tokens that have none; `position_ids` [B, L], [1, L] or of several axes [axes, B, L];
            entries that are [B, L] are sequences, whose columns go to cp.
        num_micro_batches: Micro-batches per data-parallel rank. Ranks, and a rank's micro-batches,
            differ by at most one row, the first having more; one without rows computes a row
            that does not count.
        manager: The grid; rows go to dp, columns to cp. By default the model's.
        model: What `parallelize` returned: columns are ordered as it was told. Without a model
            they are in the default order, which `train_step` refuses if it is not the model's.
        cp_layout: The order of columns, if no model says it. For "zigzag" any length will do:
            padding behind the end, without labels, is seen by no other position of causal
            attention.
        own_rows: The batch is of this data-parallel rank's rows alone; see `rows_of_step`.
        row_dims: Dims that are rows, by the names of entries whose shapes do not tell; None for an
            entry that every micro-batch gets whole: `{"pixels": 1, "table": None}`.
        sequence_dims: Dims that are positions, by the names of entries; None for one that has none:
            `{"latents": 1, "loss_noise": 1}`. cp divides them. Those of `input_ids`, of entries
            that are [B, L] beside it, and of `inputs_embeds` [B, L, H] are known.

    Returns:
        `num_micro_batches` mappings of [b, L / cp] or [b, ...] tensors, b >= 1. They have
        `position_ids` if the batch has them, and if a model could not count them itself: of
        divided sequences and of packed documents.

    Raises:
        InvalidArgumentError: Less than one micro-batch, no rows, columns that do not divide or are
            not known, no grid, not the model's order, or an entry whose rows are not known.
    """
    manager, layout = _said(manager, model, cp_layout)
    entries = _entries(batch, model)
    require_whole_number("num_micro_batches", num_micro_batches, 1)
    dims = read_row_dims(entries, row_dims)
    rows = row_count(entries, dims)
    if not rows and not own_rows:
        raise InvalidArgumentError("a global batch of 0 rows has nothing to train on")
    place, ranks = (0, 1) if own_rows else (manager.dp_rank, manager.dp_size)
    shares = rows_of_ranks(rows, ranks, num_micro_batches)[place]
    positions = read_sequence_dims(entries, sequence_dims)
    sequences = _sequences(entries, positions, layout, manager)
    counted = entries.get(POSITIONS) is None
    cut = Cut(layout, counted, entries, sequences, own_rows, dims, sequence_dims or {})
    return _sharded((_rows(entries, dims, share) for share in shares), cut, positions)


def _sequences(
    batch: Batch, positions: Positions | None, layout: str, manager: ProcessGroupManager
) -> ShardedSequences | None:
    """Return which positions of a batch this rank has; None if they are not known."""
    if positions is None:
        if manager.cp_size == 1:
            return None
        raise InvalidArgumentError(
            f"cp divides the positions of sequences, and it is not known where this batch of "
            f"{', '.join(batch)} has them: name their dims, shard_global_batch(..., "
            f"sequence_dims={{{next(iter(batch))!r}: 1}}), or take cp_size=1 and the ranks for "
            "dp, tp or pp"
        )
    of_tokens = sequence_shape(batch) is not None
    if layout != "zigzag" or not of_tokens:  # which is padded, without labels
        layout_for_length(layout, positions.length, manager.cp_size)
    if manager.cp_size > 1 and not of_tokens:
        require_all_told(batch, positions)
    documents, group = batch.get("cu_seq_lens_q"), manager.cp_group
    return ShardedSequences(positions.length, layout=layout, cu_seqlens=documents, group=group)


def _sharded(parts: Iterable[_Rows], cut: Cut, positions: Positions | None) -> list[Batch]:
    """Return micro-batches with this rank's positions, and with what has no rows.

    Args:
        parts: The rows of each.
        cut: How they are made.
        positions: Of the batch, which are divided.
    """
    divided = cut.sequences is not None and cut.sequences.ring.size > 1
    # A model counts positions as it does in one process, from wherever.
    counts = cut.counted and not divided and cut.whole.get("cu_seq_lens_q") is None
    whole = {n: cut.whole[n] for n, dim in cut.row_dims.items() if dim is None and n != POSITIONS}
    shards: list[Batch] = []
    for part in parts:
        shard = part.entries | whole
        if positions is not None and cut.sequences is not None:
            shard |= _own_positions(part.entries, shard, cut.sequences, positions)
        if counts:
            shard.pop(POSITIONS, None)
        shards.append(MicroBatch(shard, cut, is_empty=part.is_empty))
    return shards


def _own_positions(
    rows: Batch, entries: Batch, sequences: ShardedSequences, positions: Positions
) -> dict[str, Tensor]:
    """Return this rank's positions of the entries that have any.

    Args:
        rows: The entries that have rows, of a micro-batch.
        entries: All of its entries.
        sequences: The sequences.
        positions: Where the entries have them.
    """
    named = {n: sequences.shard_tensor(entries[n], dim) for n, dim in positions.dims.items()}
    if TOKENS not in rows:
        return named
    known = {n: x for n, x in rows.items() if n not in positions.dims.keys() | positions.whole}
    return sequences.shard(known, shifted=True) | named


def _said(
    manager: ProcessGroupManager | None, model: nn.Module | None, cp_layout: str | None
) -> tuple[ProcessGroupManager, str]:
    """Return the grid and the order of columns that arguments and the model say."""
    terms = None if model is None else terms_of(model)
    told = None if terms is None else terms.cp_layout
    if told is not None and cp_layout not in (None, told):
        raise InvalidArgumentError(
            f"cp_layout={cp_layout!r} contradicts the model, which attends in a {told} layout: "
            "parallelize(..., cp_layout=...) is the place to say it; leave it out here"
        )
    manager = manager or (None if terms is None else terms.manager)
    if manager is None:
        raise InvalidArgumentError(
            "shard_global_batch needs the grid: pass the manager, or as model= what parallelize "
            "returned"
        )
    return manager, told or cp_layout or DEFAULT


def _entries(given: Any, model: nn.Module | None) -> Batch:
    """Return a batch by names, with positions that a model counts of whole rows, if it does."""
    terms = None if model is None else terms_of(model)
    batch = named_entries(given, None if terms is None else terms.arguments)
    counting = None if terms is None else terms.counting
    if counting is None or batch.get(POSITIONS) is not None or sequence_shape(batch) is None:
        return batch
    return {**batch, POSITIONS: counting(batch["input_ids"])}


def require_whole_number(name: str, value: object, least: int | None = None) -> None:
    """Refuse what is no whole number, or too small a one.

    Raises:
        InvalidArgumentError: It is that.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (least is not None and value < least):  # type: ignore[operator]
        wanted = "a whole number" if least is None else f"a whole number, at least {least}"
        raise InvalidArgumentError(f"{name} must be {wanted}; it is {value!r}")


def rows_of_ranks(rows: int, ranks: int, num_micro_batches: int) -> list[list[range]]:
    """Return which rows of a batch each micro-batch of each data-parallel rank gets."""
    return [_split(own, num_micro_batches) for own in _split(range(rows), ranks)]


def _split(rows: range, shares: int) -> list[range]:
    """Return consecutive shares that differ by at most one row, longer ones first."""
    size, longer = divmod(len(rows), shares)
    ends = [index * size + min(index, longer) for index in range(shares + 1)]
    return [rows[start:end] for start, end in pairwise(ends)]


class _Rows(NamedTuple):
    """The rows of one micro-batch, with what is known to be for all rows."""

    entries: dict[str, Tensor]
    is_empty: bool


def _rows(batch: Batch, dims: Mapping[str, int | None], share: range) -> _Rows:
    """Return a share of a batch's rows; for an empty one a row that has no labels."""
    known = {name: batch[name] for name in (POSITIONS, *CU_SEQLENS) if name in batch}
    found = {n: (batch[n], dim) for n, dim in dims.items() if dim is not None}
    start, count = (share.start, len(share)) if share else (0, 1)
    rows = {
        name: entry.narrow(dim, start, count) if entry.shape[dim] else _made_row(name, entry, dim)
        for name, (entry, dim) in found.items()
    }
    if not share and "labels" in rows:
        rows["labels"] = torch.full_like(rows["labels"], IGNORED)
    return _Rows(known | rows, not share)


def _made_row(name: str, entry: Tensor, dim: int) -> Tensor:
    """Return a row for an entry that has none: zeros, or a mask that hides nothing."""
    shape = (*entry.shape[:dim], 1, *entry.shape[dim + 1 :])
    return entry.new_ones(shape) if name == "attention_mask" else entry.new_zeros(shape)


def counts_nothing(batch: Batch) -> bool:
    """Return whether a micro-batch, or what a model is called with for it, got no row."""
    source = batch.micro_batch if isinstance(batch, Called) else batch
    return isinstance(source, MicroBatch) and source.is_empty


def size_of(batch: Called) -> int:
    """Return the number of tokens of a micro-batch, or of rows if it is none of tokens."""
    entry = batch[TOKENS]
    of_tokens = entry.ndim == 2 and not entry.is_floating_point()
    return 0 if counts_nothing(batch) else max(1, entry.numel() if of_tokens else len(entry))


def real_positions(batch: Batch) -> Tensor | None:
    """Return which positions of this rank are no padding, bool [L]; None if none is.

    `shard_global_batch` puts padding behind sequences whose length does not divide over cp ranks.
    """
    if not isinstance(batch, MicroBatch):
        return None
    sequences = batch.cut.sequences
    if sequences is None:
        return None
    length = sequences.layout.length
    if sequences.layout.padded_length == length:
        return None
    return sequences.positions(batch["input_ids"].device) < length


def real_tokens(batch: Batch, positions: Tensor | None) -> Tensor | None:
    """Return which tokens of a micro-batch are no padding, bool [B, L]; None if all are none.

    Args:
        batch: Tokens that its `attention_mask` [B, L] leaves out are padding too.
        positions: See `real_positions`.
    """
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if counts_nothing(batch):
        return torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    if mask is None or mask.shape != ids.shape:
        return None if positions is None else positions.expand(ids.shape)
    return mask != 0 if positions is None else (mask != 0) & positions


def token_count(batch: Any) -> int | Tensor:
    """Return the number of labels that count: 0-d on an accelerator that has them, else an int.

    Raises:
        InvalidArgumentError: There are no labels, or none of integers.
    """
    labels = batch.get("labels")
    if labels is None:
        raise InvalidArgumentError(
            "a micro-batch without labels does not say how many losses it has, which has to be "
            "known before where gradients of several steps add up or a router's auxiliary loss is "
            "added: pass train_step(..., count_fn=), a function of the micro-batch that returns it"
        )
    if labels.is_floating_point() or labels.is_complex():
        raise InvalidArgumentError(f"labels must be integer tensors, got {labels.dtype}")
    count = (labels != IGNORED).sum()
    return int(count) if count.device.type == "cpu" else count
