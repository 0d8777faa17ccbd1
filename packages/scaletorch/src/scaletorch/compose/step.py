"""One training step under the one loss rule, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from ..dist import all_reduce
from ..dist.errors import InvalidArgumentError
from ..parallel.context_parallel import ShardedSequences, positions
from ..parallel.data_parallel import DataParallelBucket, global_token_count
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.pipeline_parallel import train_step_pipeline
from .loss import find_sharded_head, token_loss_sum

Batch = Mapping[str, Tensor]


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
        ``num_micro_batches`` mappings of [B / dp / num_micro_batches, L / cp] tensors.

    Raises:
        InvalidArgumentError: rows that do not divide, or columns that do not in another layout.
    """
    rows, length = batch["input_ids"].shape
    shares = manager.dp_size * num_micro_batches
    if rows % shares:
        raise InvalidArgumentError(
            f"a global batch of {rows} sequences does not divide into {manager.dp_size} (dp) x "
            f"{num_micro_batches} micro-batches = {shares}; use a multiple of {shares}"
        )
    first = manager.dp_rank * num_micro_batches
    parts = [_rows(batch, shares, i) for i in range(first, first + num_micro_batches)]
    if cp_layout != "zigzag":
        positions(length, manager.cp_group, layout=cp_layout)  # refuses what would be padded
    sequences = ShardedSequences(
        length, layout=cp_layout, cu_seqlens=batch.get("cu_seq_lens_q"), group=manager.cp_group
    )
    return [sequences.shard(part, shifted=True) for part in parts]


def _rows(batch: Batch, shares: int, index: int) -> Batch:
    """Return one of equal shares of a batch's rows."""
    rows = len(batch["input_ids"])
    return {
        name: entry.chunk(shares)[index] if len(entry) == rows and entry.ndim > 1 else entry
        for name, entry in batch.items()
    }


def train_step(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    *,
    scaler: GradScaler | None = None,
) -> Tensor:
    """Run forward and backward of one global batch; gradients are complete when it returns.

    Args:
        model: what ``parallelize`` returned.
        micro_batches: this rank's, from ``shard_global_batch``.
        manager: the grid.
        scaler: multiplies all gradients by its scale, but not the loss that is returned; for
            float16, see `scaletorch.parallel.data_parallel.GradScaler`.

    Returns:
        The global loss, sum of token losses / number of valid tokens over the whole global batch,
        equal on every rank; a 0-d tensor.
    """
    count = global_token_count([b["labels"] for b in micro_batches], group=manager.cp_dp_group)
    head = find_sharded_head(model)

    def loss_fn(output: Any, batch: Batch) -> Tensor:
        loss = token_loss_sum(output, batch["labels"], head) / max(count, 1)
        if scaler is not None and loss.requires_grad:
            loss.register_hook(scaler.scale)  # of the gradient with which backward begins
        return loss

    loss = train_step_pipeline(model, micro_batches, loss_fn=loss_fn, group=manager.pp_group)
    all_reduce(loss, group=manager.cp_dp_group)
    all_reduce(loss, group=manager.pp_group)  # zero where the last stage is not
    return loss
