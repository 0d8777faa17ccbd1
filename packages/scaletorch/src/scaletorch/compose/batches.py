"""This rank's micro-batches of a global batch, which know how they were cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from ..dist.errors import InvalidArgumentError
from ..parallel.context_parallel import ShardedSequences, positions
from ..parallel.pg_manager import ProcessGroupManager

Batch = Mapping[str, Tensor]


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
    manager: ProcessGroupManager,
    *,
    cp_layout: str = "zigzag",
) -> list[Batch]:
    """Return this rank's micro-batches of a global batch that every rank holds.

    Args:
        batch: entries [B, L]; labels aligned with their inputs, -100 where there is none. What
            has one dim is of all sequences and passed on, such as ``cu_seq_lens_q``, where packed
            documents begin in each of them, and the length: (0, a, ..., L).
        num_micro_batches: micro-batches per data-parallel rank; dp x this must divide B.
        manager: the grid; rows go to dp, columns to cp.
        cp_layout: which columns each cp rank gets, as ``parallelize`` was told. For "zigzag" any
            length will do: padding behind the end, without labels, is seen by no other position
            of causal attention.

    Returns:
        ``num_micro_batches`` mappings of [B / dp / num_micro_batches, L / cp] tensors. They have
        ``position_ids`` where the batch has, and where a model could not count them itself: of
        divided sequences and of packed documents.

    Raises:
        InvalidArgumentError: no ``input_ids`` [B, L], less than one micro-batch, rows that do not
            divide, or columns that do not in another layout.
    """
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
    if cp_layout != "zigzag":
        positions(length, manager.cp_group, layout=cp_layout)  # refuses what would be padded
    documents = batch.get("cu_seq_lens_q")
    sequences = ShardedSequences(
        length, layout=cp_layout, cu_seqlens=documents, group=manager.cp_group
    )
    counted = batch.get("position_ids") is None
    cut = Cut(cp_layout, counted, batch)
    shards = [sequences.shard(part, shifted=True) for part in parts]
    if counted and manager.cp_size == 1 and documents is None:
        for shard in shards:  # the model counts as it does in one process, from wherever
            del shard["position_ids"]
    return [MicroBatch(shard, cut) for shard in shards]


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
