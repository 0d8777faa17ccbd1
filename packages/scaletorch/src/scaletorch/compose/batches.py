"""This rank's micro-batches of a global batch: how they were cut, and how a model is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..dist.errors import InvalidArgumentError
from ..parallel.context_parallel import ShardedSequences
from ..parallel.context_parallel.building import DEFAULT, layout_of_whole
from ..parallel.pg_manager import ProcessGroupManager
from .forward import Terms, terms_of

Batch = Mapping[str, Tensor]

POSITIONS = "position_ids"
_APART = ("input_ids", "labels")  # entries that are not passed on by name
_OTHERWISE = (
    "{} counts its positions otherwise than 0, 1, 2, ... where it is given none (from behind its "
    "padding index, perhaps), and where sequences are divided it has to be given them: put those "
    "that it uses into the global batch as position_ids [B, L], or leave sequences whole "
    "(cp_size=1, sequence_parallel=False)"
)


class Cut(NamedTuple):
    """How a micro-batch was made.

    Attributes:
        layout: Which columns each cp rank has.
        counted: Its `position_ids`, if it has any, were counted here, not given.
        whole: The global batch.
    """

    layout: str
    counted: bool
    whole: Batch


class MicroBatch(dict[str, Tensor]):
    """A mapping of tensors [b, L / cp] that remembers its `Cut`."""

    def __init__(self, entries: Batch, cut: Cut) -> None:
        super().__init__(entries)
        self.cut = cut


def shard_global_batch(
    batch: Batch,
    num_micro_batches: int,
    manager: ProcessGroupManager | None = None,
    *,
    model: nn.Module | None = None,
    cp_layout: str | None = None,
) -> list[Batch]:
    """Return this rank's micro-batches of a global batch that every rank holds.

    Args:
        batch: Entries [B, L]; labels aligned with their inputs, -100 for tokens that have none. An
            entry of one dim is of all sequences and passed on, such as `cu_seq_lens_q`: the starts
            of packed documents in each of them, and the length: (0, a, ..., L).
        num_micro_batches: Micro-batches per data-parallel rank; dp x this must divide B.
        manager: The grid; rows go to dp, columns to cp. By default the model's.
        model: What `parallelize` returned: columns are ordered as it was told. Without a model
            they are in the default order, and `train_step` refuses them if it is not the
            model's.
        cp_layout: The order of columns, if no model says it. For "zigzag" any length will do:
            padding behind the end, without labels, is seen by no other position of causal
            attention.

    Returns:
        `num_micro_batches` mappings of [B / dp / num_micro_batches, L / cp] tensors. They have
        `position_ids` if the batch has them, and if a model could not count them itself: of
        divided sequences and of packed documents.

    Raises:
        InvalidArgumentError: No `input_ids` [B, L], less than one micro-batch, rows that do not
            divide, or columns that do not in another layout; or neither a grid nor a model that
            knows its own, or another order than the model's.
    """
    manager, layout = _said(manager, model, cp_layout)
    rows, length = _shape(batch)
    _require_count(num_micro_batches)
    shares = manager.dp_size * num_micro_batches
    if rows % shares or not rows:
        raise InvalidArgumentError(
            f"a global batch of {rows} sequences does not divide into {manager.dp_size} (dp) x "
            f"{num_micro_batches} micro-batches = {shares}; use a multiple of {shares}"
        )
    first = manager.dp_rank * num_micro_batches
    parts = [_rows(batch, shares, i) for i in range(first, first + num_micro_batches)]
    if layout != "zigzag":
        layout_of_whole(layout, length, manager.cp_size)  # refuses what would be padded
    documents = batch.get("cu_seq_lens_q")
    sequences = ShardedSequences(
        length, layout=layout, cu_seqlens=documents, group=manager.cp_group
    )
    counted = batch.get(POSITIONS) is None
    cut = Cut(layout, counted, batch)
    shards = [sequences.shard(part, shifted=True) for part in parts]
    if counted and manager.cp_size == 1 and documents is None:
        for shard in shards:  # the model counts as it does in one process, from wherever
            del shard[POSITIONS]
    return [MicroBatch(shard, cut) for shard in shards]


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


def _shape(batch: Batch) -> tuple[int, int]:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        came = list(ids.shape) if isinstance(ids, Tensor) else type(batch).__name__
        raise InvalidArgumentError(
            f"a global batch is a mapping with input_ids [B, L]; what came has {came}"
        )
    return ids.shape[0], ids.shape[1]


def _require_count(num_micro_batches: int) -> None:
    whole = isinstance(num_micro_batches, int) and not isinstance(num_micro_batches, bool)
    if not whole or num_micro_batches < 1:
        raise InvalidArgumentError(
            f"num_micro_batches must be a whole number, at least 1; it is {num_micro_batches!r}"
        )


def _rows(batch: Batch, shares: int, index: int) -> Batch:
    """Return one of equal shares of a batch's rows."""
    rows = len(batch["input_ids"])
    return {
        name: entry.chunk(shares)[index] if len(entry) == rows and entry.ndim > 1 else entry
        for name, entry in batch.items()
    }


def as_called(batch: Batch, terms: Terms) -> Batch:
    """Return a micro-batch with the entries that the model is to be called with.

    Raises:
        InvalidArgumentError: It was cut in another layout than the model's, or has entries that
            the model's forward does not take, or lacks positions that nobody else knows.
    """
    cut = batch.cut if isinstance(batch, MicroBatch) else None
    if cut is not None and terms.cp_layout not in (None, cut.layout):
        raise InvalidArgumentError(
            f"this batch was cut in a {cut.layout} layout, and the model attends in a "
            f"{terms.cp_layout} one: let shard_global_batch ask the model, "
            "shard_global_batch(..., model=model)"
        )
    entries = dict(batch)
    given = POSITIONS in entries and not (cut is not None and cut.counted)
    if terms.counts_otherwise and not given:
        raise InvalidArgumentError(_OTHERWISE.format(terms.name))
    if not given and not terms.takes(POSITIONS):
        entries.pop(POSITIONS, None)  # whether it counts them itself is asked in the first step
    strangers = [name for name in entries if name not in _APART and not terms.takes(name)]
    if strangers:
        raise InvalidArgumentError(
            f"the batch has {', '.join(strangers)}, and the forward of {terms.name} takes no "
            f"argument of that name, only {', '.join(terms.arguments)}; leave it out of the batch, "
            "or let forward take it"
        )
    if POSITIONS not in entries and _must_be_told(terms):
        ids = entries["input_ids"]
        entries[POSITIONS] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    return entries


def _must_be_told(terms: Terms) -> bool:
    """Return whether a model cannot count: it does not want to, or would count a shard's tokens."""
    return terms.needs(POSITIONS) or (terms.shares_sequences and terms.takes(POSITIONS))
