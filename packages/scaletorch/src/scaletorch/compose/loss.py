"""The one loss, of whole logits or of shards of the vocabulary; and what a loss_fn is given."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..dist.errors import InvalidArgumentError
from ..parallel import pg_manager
from ..parallel.context_parallel import ShardedSequences
from ..parallel.context_parallel.building import DEFAULT
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from .batches import Batch, MicroBatch

_MARK = "_scaletorch_loss_parallel"


def keep_logits_sharded(model: nn.Module) -> None:
    """Let a tensor-parallel model's head return this rank's shard of the vocabulary, in place.

    Raises:
        InvalidArgumentError: The model has no head of style "column_gather", or several.
    """
    heads = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, ColumnParallelLinear) and module.gather_output
    ]
    if len(heads) != 1:
        raise InvalidArgumentError(
            "loss_parallel needs one head of style 'column_gather', whose logits stay divided; "
            f"{type(model).__name__} has {', '.join(name for name, _ in heads) or 'none'}"
        )
    head = heads[0][1]
    head.gather_output = False
    vars(head)[_MARK] = True


def find_sharded_head(model: nn.Module) -> ColumnParallelLinear | None:
    """Return the head whose logits stay sharded, or None if they are whole or on other stages."""
    heads = (m for m in model.modules() if isinstance(m, ColumnParallelLinear) and _MARK in vars(m))
    return next(heads, None)


def token_loss_sum(output: Any, labels: Tensor, head: ColumnParallelLinear | None = None) -> Tensor:
    """Return the sum of token cross entropies, in float32 at least; labels of -100 count nothing.

    Args:
        output: Logits [B, L, V], or a model's output that has them as its `logits`.
        labels: [B, L] int64, aligned with the logits.
        head: The layer that made [B, L, V / tp], this rank's shard of the logits; None for whole
            ones.
    """
    logits: Tensor = getattr(output, "logits", output)
    if head is not None:
        return vocab_parallel_cross_entropy(
            logits, labels, reduction="sum", group=head.group, vocab_size=head.out_features
        )
    return pg_manager.token_loss_sum(logits, labels)


def require_labels_fit(logits: Tensor, labels: object, tp_size: int) -> Tensor:
    """Return labels that are one for each token that the logits have.

    Args:
        logits: [B, L, V], or this rank's shard of the vocabulary.
        labels: What the micro-batch has.
        tp_size: How many ranks have the same labels.

    Raises:
        InvalidArgumentError: They have another shape, or are none.
    """
    shape = list(logits.shape[:-1])
    came = list(labels.shape) if isinstance(labels, Tensor) else "none"
    if isinstance(labels, Tensor) and came == shape:
        return labels
    shares = tp_size > 1 and isinstance(labels, Tensor) and list(labels.shape[:1]) == shape[:1]
    why = shares * (
        ". With sequence_parallel a layer that the plan does not name is given this rank's share "
        "of the tokens: name the head 'column_gather' in the plan, or do without sequence_parallel"
    )
    raise InvalidArgumentError(
        f"{describe_rank()}: logits {list(logits.shape)} need labels {shape}, one for each token "
        f"that this rank holds; the micro-batch has {came}{why}"
    )


def require_logits_alone(output: Any, *, with_router_loss: bool = False) -> None:
    """Refuse an output that has a loss beside its logits.

    Args:
        output: The model's.
        with_router_loss: Its `aux_loss` is computed anew, of the global batch.

    Raises:
        InvalidArgumentError: It has, or it has no logits.
    """
    given = (
        output if isinstance(output, dict) else vars(output) if hasattr(output, "__dict__") else {}
    )
    for name in ("loss", "z_loss", *(() if with_router_loss else ("aux_loss",))):
        value = None if isinstance(output, Tensor) else given.get(name)
        if isinstance(value, Tensor) and value.requires_grad:
            raise InvalidArgumentError(
                f"{type(output).__name__} has {name} beside its logits, and train_step trains by "
                f"the cross entropy of tokens alone: {name} would be left out. Turn it off in the "
                "model, or write the loss yourself (train_step_pipeline takes a loss_fn)"
            )
    if not isinstance(getattr(output, "logits", output), Tensor):
        raise InvalidArgumentError(
            "train_step needs a model that returns its logits [B, L, V], or an output that has "
            f"them as .logits; it returned {_described(output)}"
        )


def _described(output: Any) -> str:
    if isinstance(output, tuple | list):
        inner = ", ".join(_described(entry) for entry in output)
        return f"a {type(output).__name__} of {inner or 'nothing'}"
    if isinstance(output, Tensor):
        return f"a tensor {list(output.shape)}"
    return type(output).__name__


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
