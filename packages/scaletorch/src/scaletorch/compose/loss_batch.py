"""A micro-batch as a loss of the user's own sees it: with where its logits and positions lie."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from ..dist.errors import InvalidArgumentError
from ..parallel.context_parallel import ShardedSequences
from ..parallel.context_parallel.building import DEFAULT
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.tensor_parallel import ColumnParallelLinear
from .batches import Batch, MicroBatch


class LossBatch(dict[str, Any]):
    """All entries of a micro-batch, and what this rank holds of it.

    Attributes:
        head: The layer whose logits are this rank's shard of the vocabulary; None if they are
            whole.
        tp_size: How many ranks have the same positions.
        cp_group: The ranks that have the other positions of these sequences.
        sequences: Which positions this rank has; None if the micro-batch was cut by hand, or is
            not of tokens.
    """

    def __init__(
        self, batch: Batch, head: ColumnParallelLinear | None, manager: ProcessGroupManager
    ) -> None:
        super().__init__(batch)
        self.head = head
        self.tp_size = manager.tp_size
        self.cp_group: ProcessGroup | None = manager.cp_group
        self.sequences = _sequences(batch, manager)


def _sequences(batch: Batch, manager: ProcessGroupManager) -> ShardedSequences | None:
    if isinstance(batch, MicroBatch):
        return batch.cut.sequences
    ids = batch.get("input_ids")
    if manager.cp_size > 1 or not isinstance(ids, Tensor) or ids.ndim != 2:
        return None
    documents = batch.get("cu_seq_lens_q")
    group = manager.cp_group
    return ShardedSequences(ids.shape[1], layout=DEFAULT, cu_seqlens=documents, group=group)


def require_loss_batch(batch: object, caller: str) -> LossBatch:
    """Return the micro-batch, which knows its place in the global batch.

    Raises:
        InvalidArgumentError: It is not what a loss_fn was given.
    """
    if isinstance(batch, LossBatch):
        return batch
    raise InvalidArgumentError(
        f"{caller} takes the micro-batch that loss_fn(output, micro_batch) was given, which knows "
        f"where its positions and logits lie; a {type(batch).__name__} does not. Call it within a "
        "loss_fn, or within a function given to forward_step"
    )


def require_sequences(batch: object, caller: str) -> ShardedSequences:
    """Return which positions this rank has.

    Raises:
        InvalidArgumentError: Nobody knows.
    """
    sequences = require_loss_batch(batch, caller).sequences
    if sequences is None:
        raise InvalidArgumentError(
            f"{caller} has to know which positions of the sequences this rank holds, and this "
            "micro-batch has no input_ids [B, L], or was cut by hand: let shard_global_batch make "
            "it of a batch that has them"
        )
    return sequences
