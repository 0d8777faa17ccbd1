"""What a loss takes of logits, token by token, be they whole or shards of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dist import all_reduce, functional
from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import IGNORED
from ..parallel.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from .loss import require_labels_fit
from .loss_batch import LossBatch, require_loss_batch


def token_losses(
    output: Any, micro_batch: Any, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Return the cross entropy of every token, [B, L] in float32 at least; 0 for labels of -100.

    Args:
        output: Logits [B, L, V], or this rank's shard of them, or an output that has `logits`.
        micro_batch: What loss_fn was given, with `labels` [B, L].
        label_smoothing: Share of each target that is spread over the vocabulary.
        z_loss: Adds `z_loss * logsumexp(logits) ** 2` for every token that counts.

    Raises:
        InvalidArgumentError: No logits, or labels of another shape.
    """
    batch = require_loss_batch(micro_batch, "token_losses")
    logits = _logits(output, batch)
    labels = require_labels_fit(logits, batch.get("labels"), batch.tp_size)
    head = _sharded(logits, batch)
    if head is not None:
        return vocab_parallel_cross_entropy(
            logits, labels, reduction="none", group=head.group, vocab_size=head.out_features,
            label_smoothing=label_smoothing, z_loss=z_loss,
        )  # fmt: skip
    flat, targets = logits.flatten(0, -2), labels.flatten()
    losses = F.cross_entropy(
        flat, targets, ignore_index=IGNORED, reduction="none", label_smoothing=label_smoothing
    ).view_as(labels)
    if z_loss:
        losses = losses + z_loss * logits.logsumexp(-1).square().masked_fill(labels == IGNORED, 0)
    return losses


def token_log_probs(output: Any, micro_batch: Any) -> Tensor:
    """Return the log-probability of every label, [B, L] in float32 at least; 0 for labels of -100.

    Args:
        output: As for `token_losses`.
        micro_batch: As for `token_losses`.
    """
    return -token_losses(output, micro_batch)


def log_probs(output: Any, micro_batch: Any) -> Tensor:
    """Return the log-probability of every word: of all, or of this rank's shard of the vocabulary.

    What is computed of it word by word goes through `vocabulary_sums`. Of a model whose logits are
    whole (a teacher without `loss_parallel`) this rank's shard is taken, if the trained one's are.

    Args:
        output: Logits [B, L, V], or this rank's shard of them, or an output that has `logits`.
        micro_batch: What loss_fn was given.

    Returns:
        [B, L, V] or [B, L, V / tp], in float32 at least.
    """
    batch = require_loss_batch(micro_batch, "log_probs")
    logits, whole = _logits(output, batch), batch.head
    head = _sharded(logits, batch)
    if head is None:
        found = logits.log_softmax(-1)
        if whole is None or whole.tp_size == 1:
            return found
        return functional.split(found, -1, whole.group, sizes=whole.cut.sizes)
    highest = logits.detach().amax(-1, keepdim=True)
    all_reduce(highest, "max", group=head.group)
    shifted = logits - highest
    total = functional.reduce(shifted.exp().sum(-1, keepdim=True), head.group)
    # Each rank goes on with its own words: the sum of what they make of it is its gradient.
    return shifted - functional.copy(total.log(), head.group)


def vocabulary_sums(values: Tensor, micro_batch: Any) -> Tensor:
    """Sum over the vocabulary what was computed word by word, [B, L]; the same on all tp ranks.

    Args:
        values: [B, L, V], or [B, L, V / tp] as `log_probs` gives it.
        micro_batch: What loss_fn was given.
    """
    head = _sharded(values, require_loss_batch(micro_batch, "vocabulary_sums"))
    total = values.sum(-1)
    return total if head is None else functional.reduce(total, head.group)


def _logits(output: Any, batch: LossBatch) -> Tensor:
    """Return an output's logits in float32 at least."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or not logits.is_floating_point():
        came = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise InvalidArgumentError(
            f"expected logits [B, L, V], or an output that has them as .logits; it is {came}"
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _sharded(values: Tensor, batch: LossBatch) -> ColumnParallelLinear | None:
    """Return the head of whose outputs these are this rank's shard, or None if they are whole."""
    head = batch.head
    whole = head is None or head.tp_size == 1 or values.shape[-1] == head.out_features
    return None if whole else head
