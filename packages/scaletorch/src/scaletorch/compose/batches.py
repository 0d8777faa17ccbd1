"""Cut this rank's micro-batches from a global batch, and count their tokens."""

from __future__ import annotations

from collections.abc import Mapping
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
from .forward import Terms, terms_of

Batch = Mapping[str, Tensor]


class Cut(NamedTuple):
    """The cut that made a micro-batch."""

    layout: str  # the order of columns over cp ranks
    counted: bool  # any `position_ids` were computed, not given in the batch
    whole: Batch  # the global batch, or the rows that this data-parallel rank has read (`own`)
    sequences: ShardedSequences | None  # this rank's positions, if they are known
    own: bool = False
    row_dims: RowDims = MappingProxyType({})  # None if every micro-batch gets the whole entry
    sequence_dims: RowDims = MappingProxyType({})  # those that the caller has named


class MicroBatch(dict[str, Tensor]):
    """A mapping of tensors [b, L / cp] that remembers its `Cut`.

    If `is_empty`, it has no row of the batch, but a made-up one that counts in no loss.
    """

    def __init__(self, entries: Batch, cut: Cut, *, is_empty: bool = False) -> None:
        super().__init__(entries)
        self.cut, self.is_empty = cut, is_empty


class Called(dict[str, Tensor]):
    """The entries that a model is called with, and the number of losses in them."""

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
    own_rows: bool = False,
    row_dims: RowDims | None = None,
    sequence_dims: RowDims | None = None,
) -> list[Batch]:
    """Return this rank's micro-batches of a global batch.

    Args:
        batch: A mapping from names to tensors, a dataclass or (with `model`) a tuple of the
            forward's arguments, the same on every rank. Rows are dim 0 of every entry, [B, ...].
            Every micro-batch gets whole: numbers, tensors whose dim 0 has size 1, and the starts of
            packed documents `cu_seq_lens_q` (0, a, ..., L). Entries named `loss_...` go to your
            loss_fn, not to the model. Models of tokens take `input_ids` [B, L]; `labels` [B, L],
            -100 for tokens that have none; `position_ids` [B, L], [1, L] or of several axes
            [axes, B, L]. cp divides the columns of every entry that is [B, L].
        num_micro_batches: Micro-batches per data-parallel rank. Ranks, and a rank's micro-batches,
            differ by at most one row, the first ones having more. A micro-batch that gets no row
            computes one that does not count.
        manager: The grid: dp divides rows, cp divides columns. By default the model's.
        model: The model that `parallelize` returned; it gives the order of columns. Without a model
            they are in the default order, and `train_step` raises if that is not the model's.
            "zigzag" takes any length: sequences are padded at the end, without labels; causal
            attention ignores the padding.
        own_rows: The batch has only this data-parallel rank's rows; see `rows_of_step`.
        row_dims: Dims of rows, by name of entry, if shapes are ambiguous; None if every
            micro-batch gets the whole entry: `{"pixels": 1, "table": None}`.
        sequence_dims: Dims of positions, by name of entry, which cp divides; None if an entry has
            none: `{"latents": 1, "loss_noise": 1}`. Known by default: `input_ids`, entries [B, L]
            next to it, and `inputs_embeds` [B, L, H].

    Returns:
        `num_micro_batches` mappings of [b, L / cp] or [b, ...] tensors, b >= 1. They have
        `position_ids` if the batch has them, or if the model could not count them itself: for
        sequences that cp divides, and for packed documents.

    Raises:
        InvalidArgumentError: No micro-batch, rows or grid; dims unknown; columns cp cannot divide.
    """
    terms = None if model is None else terms_of(model)
    manager = _grid(manager, terms)
    layout = DEFAULT if terms is None or terms.cp_layout is None else terms.cp_layout
    entries = _entries(batch, terms)
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
    return [_micro_batch(cut, share, positions) for share in shares]


def _grid(manager: ProcessGroupManager | None, terms: Terms | None) -> ProcessGroupManager:
    manager = manager or (None if terms is None else terms.manager)
    if manager is None:
        raise InvalidArgumentError(
            "shard_global_batch needs the grid: pass the manager, or as model= what parallelize "
            "returned"
        )
    return manager


def _entries(batch: object, terms: Terms | None) -> dict[str, Any]:
    """Return a batch by name; add `position_ids` if the model computes its own from whole rows."""
    entries = named_entries(batch, None if terms is None else terms.arguments)
    counting = None if terms is None else terms.counting
    given = entries.get(POSITIONS) is not None
    if counting is not None and not given and sequence_shape(entries) is not None:
        entries[POSITIONS] = counting(entries[TOKENS])
    return entries


def _sequences(
    batch: Batch, positions: Positions | None, layout: str, manager: ProcessGroupManager
) -> ShardedSequences | None:
    """Return the positions of a batch that this rank has; None if they are not known."""
    if positions is None:
        if manager.cp_size == 1:
            return None
        raise InvalidArgumentError(
            f"cp divides the positions of sequences, and it is not known where this batch of "
            f"{', '.join(batch)} has them: name their dims, shard_global_batch(..., "
            f"sequence_dims={{{next(iter(batch))!r}: 1}}), or take cp_size=1"
        )
    of_tokens = sequence_shape(batch) is not None
    if layout != "zigzag" or not of_tokens:  # zigzag pads tokens of any length
        layout_for_length(layout, positions.length, manager.cp_size)
    if manager.cp_size > 1 and not of_tokens:
        require_all_told(batch, positions)
    documents, group = batch.get("cu_seq_lens_q"), manager.cp_group
    return ShardedSequences(positions.length, layout=layout, cu_seqlens=documents, group=group)


def _micro_batch(cut: Cut, share: range, positions: Positions | None) -> MicroBatch:
    """Return this rank's positions of a range of rows; for an empty range, of one made-up row."""
    batch, sequences = cut.whole, cut.sequences
    start, count = (share.start, len(share)) if share else (0, 1)
    rows = {name: batch[name] for name in (POSITIONS, *CU_SEQLENS) if name in batch}
    rows |= {
        name: batch[name].narrow(dim, start, count)
        if batch[name].shape[dim]
        else _made_row(name, batch[name], dim)
        for name, dim in cut.row_dims.items()
        if dim is not None
    }
    if not share and "labels" in rows:
        rows["labels"] = torch.full_like(rows["labels"], IGNORED)
    entries = dict(rows)
    entries |= {n: batch[n] for n, dim in cut.row_dims.items() if dim is None and n != POSITIONS}
    if positions is not None and sequences is not None:
        named = {n: sequences.shard_tensor(entries[n], dim) for n, dim in positions.dims.items()}
        if TOKENS in rows:
            left_out = positions.dims.keys() | positions.whole
            known = {n: x for n, x in rows.items() if n not in left_out}
            entries |= sequences.shard(known, shifted=True)
        entries |= named
    divided = sequences is not None and sequences.ring.size > 1
    if cut.counted and not divided and batch.get("cu_seq_lens_q") is None:
        entries.pop(POSITIONS, None)  # the model counts them, as in one process (maybe not from 0)
    return MicroBatch(entries, cut, is_empty=not share)


def require_whole_number(name: str, value: object, least: int | None = None) -> None:
    """Require an integer, of at least `least`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (least is not None and value < least):  # type: ignore[operator]
        wanted = "a whole number" if least is None else f"a whole number, at least {least}"
        raise InvalidArgumentError(f"{name} must be {wanted}; it is {value!r}")


def rows_of_ranks(rows: int, ranks: int, num_micro_batches: int) -> list[list[range]]:
    """Return the rows of a batch for each data-parallel rank and each of its micro-batches."""
    return [_split(own, num_micro_batches) for own in _split(range(rows), ranks)]


def _split(rows: range, shares: int) -> list[range]:
    """Split rows into consecutive ranges that differ by at most one row, longer ones first."""
    size, longer = divmod(len(rows), shares)
    ends = [index * size + min(index, longer) for index in range(shares + 1)]
    return [rows[start:end] for start, end in pairwise(ends)]


def _made_row(name: str, entry: Tensor, dim: int) -> Tensor:
    """Return a row for an entry without rows: zeros, or ones for an attention mask."""
    shape = (*entry.shape[:dim], 1, *entry.shape[dim + 1 :])
    return entry.new_ones(shape) if name == "attention_mask" else entry.new_zeros(shape)


def counts_nothing(batch: Batch) -> bool:
    """Return whether a micro-batch, or the `Called` made from it, got no row."""
    source = batch.micro_batch if isinstance(batch, Called) else batch
    return isinstance(source, MicroBatch) and source.is_empty


def size_of(batch: Called) -> int:
    """Return the number of tokens of a micro-batch, or of rows if it has no tokens."""
    entry = batch[TOKENS]
    of_tokens = entry.ndim == 2 and not entry.is_floating_point()
    return 0 if counts_nothing(batch) else max(1, entry.numel() if of_tokens else len(entry))


def real_positions(batch: Batch) -> Tensor | None:
    """Return a mask of this rank's positions before the padding over cp, bool [L]; None for all."""
    sequences = batch.cut.sequences if isinstance(batch, MicroBatch) else None
    if sequences is None or sequences.layout.padded_length == sequences.layout.length:
        return None
    return sequences.positions(batch["input_ids"].device) < sequences.layout.length


def token_count(batch: Any) -> int | Tensor:
    """Return the number of labels other than -100: an int, or a 0-d tensor on an accelerator."""
    labels = batch.get("labels")
    if labels is None:
        raise InvalidArgumentError(
            "a micro-batch has no labels, and losses must be counted before a step that adds to "
            "gradients of earlier steps: pass train_step(..., count_fn=), a function of the "
            "micro-batch that returns the number of its losses"
        )
    if labels.is_floating_point() or labels.is_complex():
        raise InvalidArgumentError(f"labels must be integer tensors, got {labels.dtype}")
    count = (labels != IGNORED).sum()
    return int(count) if count.device.type == "cpu" else count
