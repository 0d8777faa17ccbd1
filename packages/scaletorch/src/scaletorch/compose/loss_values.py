"""What a loss takes of logits, token by token, and of whole sequences, on whichever rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dist import all_reduce, functional
from ..dist.errors import InvalidArgumentError
from ..parallel.context_parallel import ShardedSequences
from ..parallel.pg_manager import IGNORED
from ..parallel.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from .loss import LossBatch, require_labels_fit, require_loss_batch, require_sequences


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


def sequence_sums(values: Tensor, micro_batch: Any) -> Tensor:
    """Sum tokens' values over each sequence, or each packed document; the same on all cp ranks.

    Args:
        values: [B, L] for the positions that this rank holds, such as `token_log_probs`.
        micro_batch: What loss_fn was given.

    Returns:
        [B], or [B, documents] if the batch has `cu_seq_lens_q`. Every cp rank goes on with all of
        them, and counts all of them.

    Raises:
        InvalidArgumentError: Values of other positions.
    """
    sequences = require_sequences(micro_batch, "sequence_sums")
    positions = _positions(values, sequences, "sequence_sums")
    values = values.masked_fill(positions >= sequences.layout.length, 0)
    sums = values.sum(1)
    if sequences.documents is not None:
        ends = torch.tensor(sequences.documents[1:], device=values.device)
        document = torch.bucketize(positions, ends, right=True).clamp_(max=len(ends) - 1)
        sums = values.new_zeros(len(values), len(ends)).index_add(1, document, values)
    return functional.all_reduce(sums, sequences.ring.group) if sequences.ring.size > 1 else sums


def last_token(values: Tensor, micro_batch: Any, positions: Tensor | None = None) -> Tensor:
    """Return the values at each sequence's last token; the same on all cp ranks.

    Args:
        values: [B, L, ...] for the positions that this rank holds, such as the logits of a head
            of classes, or the scores of a reward model.
        micro_batch: What loss_fn was given.
        positions: [B] int64, where each sequence's last token is, counted in whole sequences, if
            they are padded (an entry `loss_last` of the global batch, say); by default the last
            position, or that of each packed document.

    Returns:
        [B, ...], or [B, documents, ...] if the batch has `cu_seq_lens_q` and no `positions` are
        given. Every cp rank goes on with all of them, and counts all of them.

    Raises:
        InvalidArgumentError: Values of other positions, or positions that are none.
    """
    sequences = require_sequences(micro_batch, "last_token")
    own = _positions(values, sequences, "last_token")
    wanted = _wanted(positions, sequences, values)
    equal = wanted[:, :, None] == own  # [B, D, L]
    index = equal.int().argmax(-1).view(*wanted.shape, *[1] * (values.ndim - 2))
    found = values.gather(1, index.expand(-1, -1, *values.shape[2:]))
    here = equal.any(-1).view(index.shape)
    found = torch.where(here, found, found.new_zeros(()))
    if positions is not None or sequences.documents is None:
        found = found.squeeze(1)
    return functional.all_reduce(found, sequences.ring.group) if sequences.ring.size > 1 else found


def _positions(values: Tensor, sequences: ShardedSequences, caller: str) -> Tensor:
    """Return which positions this rank holds, [L], if the values are theirs."""
    length = sequences.layout.local_length
    if not isinstance(values, Tensor) or values.ndim < 2 or values.shape[1] != length:
        came = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InvalidArgumentError(
            f"{caller} takes values [B, {length}, ...] of the {length} positions that this rank "
            f"holds, got {came}; with sequence_parallel a head must be one of style "
            "'column_gather', which takes in all tokens"
        )
    return sequences.positions(values.device)


def _wanted(positions: Tensor | None, sequences: ShardedSequences, values: Tensor) -> Tensor:
    """Return the positions to take, [B, D]."""
    length, rows = sequences.layout.length, len(values)
    if positions is None:
        ends = (sequences.documents or (0, length))[1:]
        return torch.tensor(ends, device=values.device).sub_(1).expand(rows, -1)
    integers = isinstance(positions, Tensor) and not positions.is_floating_point()
    if not integers or positions.shape != (rows,):
        came = list(positions.shape) if isinstance(positions, Tensor) else type(positions).__name__
        raise InvalidArgumentError(
            f"positions of last tokens are integers [{rows}], one for each sequence; got {came}"
        )
    if bool(((positions < 0) | (positions >= length)).any()):
        raise InvalidArgumentError(
            f"positions of last tokens are from 0 to {length - 1}, counted in whole sequences; got "
            f"{positions.tolist()}"
        )
    return positions.to(values.device)[:, None]
