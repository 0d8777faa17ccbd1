"""Cross entropy of whole or vocabulary-sharded logits, and helpers for a user's loss_fn."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..dist import all_reduce, functional
from ..dist.errors import InvalidArgumentError
from ..parallel import pg_manager
from ..parallel.context_parallel import ShardedSequences
from ..parallel.context_parallel.building import DEFAULT
from ..parallel.pg_manager import IGNORED, ProcessGroupManager, describe_rank
from ..parallel.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from .batches import Batch, MicroBatch, token_count

_MARK = "_scaletorch_loss_parallel"


def keep_logits_sharded(model: nn.Module) -> None:
    """Make a tensor-parallel model's head return this rank's shard of the logits, in place."""
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
    """Return the head whose logits stay sharded; None if logits are whole or on another stage."""
    heads = (m for m in model.modules() if isinstance(m, ColumnParallelLinear) and _MARK in vars(m))
    return next(heads, None)


def token_loss_sum(output: Any, labels: Tensor, head: ColumnParallelLinear | None = None) -> Tensor:
    """Return the sum of token cross entropies, in float32 at least; labels of -100 do not count.

    Args:
        output: Logits [B, L, V], or a model's output that has them as its `logits`.
        labels: [B, L] int64, aligned with the logits.
        head: The layer that made [B, L, V / tp], this rank's shard of the logits; None if logits
            are whole.
    """
    logits: Tensor = getattr(output, "logits", output)
    if head is not None:
        return vocab_parallel_cross_entropy(
            logits, labels, reduction="sum", group=head.group, vocab_size=head.out_features
        )
    return pg_manager.token_loss_sum(logits, labels)


def loss_of_tokens(output: Any, batch: LossBatch) -> tuple[Tensor, int | Tensor]:
    """Return the sum of token losses and their number, after checking output and labels."""
    require_logits_alone(output)
    logits = getattr(output, "logits", output)
    labels = require_labels_fit(logits, batch.get("labels"))
    return token_loss_sum(output, labels, batch.head), token_count(batch)


def require_labels_fit(logits: Tensor, labels: object) -> Tensor:
    """Return the labels; refuse them unless there is one for each token of the logits."""
    shape = list(logits.shape[:-1])
    came = list(labels.shape) if isinstance(labels, Tensor) else "none"
    if isinstance(labels, Tensor) and came == shape:
        return labels
    raise InvalidArgumentError(
        f"{describe_rank()}: logits {list(logits.shape)} need labels {shape}, one for each token "
        f"that this rank holds; the micro-batch has {came}"
    )


def require_logits_alone(output: Any) -> None:
    """Refuse an output without logits, or with a loss of its own that would be ignored."""
    given = output if isinstance(output, dict) else getattr(output, "__dict__", {})
    for name in ("loss", "z_loss", "aux_loss"):
        value = None if isinstance(output, Tensor) else given.get(name)
        if isinstance(value, Tensor) and value.requires_grad:
            raise InvalidArgumentError(
                f"{type(output).__name__} has {name} beside its logits, and train_step trains by "
                f"the cross entropy of tokens alone: {name} would be left out. Turn it off in the "
                "model, or pass train_step a loss_fn that adds it"
            )
    if not isinstance(getattr(output, "logits", output), Tensor):
        raise InvalidArgumentError(
            "train_step needs a model that returns its logits [B, L, V], or an output that has "
            f"them as .logits; it returned a {type(output).__name__}"
        )


class LossBatch(dict[str, Any]):
    """All entries of a micro-batch, and the place of this rank's shard in the global batch."""

    def __init__(
        self, batch: Batch, head: ColumnParallelLinear | None, manager: ProcessGroupManager
    ) -> None:
        super().__init__(batch)
        self.head = head  # the layer whose logits are this rank's shard of the vocabulary
        self.sequences = _sequences(batch, manager)  # this rank's positions, if they are known


def _sequences(batch: Batch, manager: ProcessGroupManager) -> ShardedSequences | None:
    if isinstance(batch, MicroBatch):
        return batch.cut.sequences
    ids = batch.get("input_ids")
    if manager.cp_size > 1 or not isinstance(ids, Tensor) or ids.ndim != 2:
        return None
    documents, group = batch.get("cu_seq_lens_q"), manager.cp_group
    return ShardedSequences(ids.shape[1], layout=DEFAULT, cu_seqlens=documents, group=group)


def require_loss_batch(batch: object, caller: str) -> LossBatch:
    """Return the micro-batch; refuse one that is not a `LossBatch`, as passed to a loss_fn."""
    if isinstance(batch, LossBatch):
        return batch
    raise InvalidArgumentError(
        f"{caller} takes the micro-batch that loss_fn(output, micro_batch) was given, got a "
        f"{type(batch).__name__}: call it within a loss_fn, or a function given to forward_step"
    )


def require_sequences(batch: object, caller: str) -> ShardedSequences:
    """Return the positions that this rank has; refuse a micro-batch that does not know them."""
    sequences = require_loss_batch(batch, caller).sequences
    if sequences is None:
        raise InvalidArgumentError(
            f"{caller} has to know which positions of the sequences this rank holds, and this "
            "micro-batch has no input_ids [B, L], or was cut by hand: let shard_global_batch make "
            "it of a batch that has them"
        )
    return sequences


def token_losses(
    output: Any, micro_batch: Any, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Return the cross entropy of every token, [B, L] in float32 at least; 0 for labels of -100.

    Args:
        output: Logits [B, L, V], or this rank's shard of them, or an output that has `logits`.
        micro_batch: The micro-batch passed to loss_fn, with `labels` [B, L].
        label_smoothing: Fraction of each target that is spread over the vocabulary.
        z_loss: Adds `z_loss * logsumexp(logits) ** 2` for every token that counts.

    Raises:
        InvalidArgumentError: The output has no logits, or labels have another shape.
    """
    batch = require_loss_batch(micro_batch, "token_losses")
    logits = _logits(output)
    labels = require_labels_fit(logits, batch.get("labels"))
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

    `output` and `micro_batch` are as for `token_losses`.
    """
    return -token_losses(output, micro_batch)


def log_probs(output: Any, micro_batch: Any) -> Tensor:
    """Return the log-probability of every word of the vocabulary, or of this rank's shard of it.

    Sum values computed from it word by word with `vocabulary_sums`. If the trained model's logits
    are sharded, whole logits of another model (a teacher without `loss_parallel`) are cut to this
    rank's shard.

    Args:
        output: Logits [B, L, V], or this rank's shard of them, or an output that has `logits`.
        micro_batch: The micro-batch passed to loss_fn.

    Returns:
        [B, L, V] or [B, L, V / tp], in float32 at least.
    """
    batch = require_loss_batch(micro_batch, "log_probs")
    logits, whole = _logits(output), batch.head
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
    # Each rank uses the total for its own words only, so backward sums its gradient over ranks.
    return shifted - functional.copy(total.log(), head.group)


def vocabulary_sums(values: Tensor, micro_batch: Any) -> Tensor:
    """Sum values of single words over the vocabulary, [B, L]; the same on all tp ranks.

    Args:
        values: [B, L, V], or [B, L, V / tp], as `log_probs` returns it.
        micro_batch: The micro-batch passed to loss_fn.
    """
    head = _sharded(values, require_loss_batch(micro_batch, "vocabulary_sums"))
    total = values.sum(-1)
    return total if head is None else functional.reduce(total, head.group)


def _logits(output: Any) -> Tensor:
    """Return an output's logits, in float32 at least."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or not logits.is_floating_point():
        came = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise InvalidArgumentError(
            f"expected logits [B, L, V], or an output that has them as .logits; it is {came}"
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _sharded(values: Tensor, batch: LossBatch) -> ColumnParallelLinear | None:
    """Return the head if the values are this rank's shard of the vocabulary; None if whole."""
    head = batch.head
    whole = head is None or head.tp_size == 1 or values.shape[-1] == head.out_features
    return None if whole else head


def sequence_sums(values: Tensor, micro_batch: Any) -> Tensor:
    """Sum tokens' values over each sequence, or each packed document; the same on all cp ranks.

    Args:
        values: [B, L] for the positions that this rank holds, such as `token_log_probs`.
        micro_batch: The micro-batch passed to loss_fn.

    Returns:
        [B], or [B, documents] if the batch has `cu_seq_lens_q`. Every cp rank has all sums, and its
        loss_fn counts all of them.

    Raises:
        InvalidArgumentError: `values` does not have this rank's positions.
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
        values: [B, L, ...] for the positions that this rank holds, such as the logits of a
            classifier, or the scores of a reward model.
        micro_batch: The micro-batch passed to loss_fn.
        positions: [B] int64, the position of each sequence's last token, counted in whole
            sequences, if sequences are padded (for example an entry `loss_last` of the global
            batch). By default the last position, or that of each packed document.

    Returns:
        [B, ...], or [B, documents, ...] if the batch has `cu_seq_lens_q` and no `positions` are
        given. Every cp rank has all of them, and its loss_fn counts all of them.

    Raises:
        InvalidArgumentError: `values` does not have this rank's positions, or `positions` are not
            [B] integers within the sequences.
    """
    sequences = require_sequences(micro_batch, "last_token")
    own = _positions(values, sequences, "last_token")
    wanted = _wanted(positions, sequences, values)
    equal = wanted[:, :, None] == own  # [B, D, L]
    index = equal.int().argmax(-1).view(*wanted.shape, *[1] * (values.ndim - 2))
    found = values.gather(1, index.expand(-1, -1, *values.shape[2:]))
    is_held = equal.any(-1).view(index.shape)
    found = torch.where(is_held, found, found.new_zeros(()))
    if positions is not None or sequences.documents is None:
        found = found.squeeze(1)
    return functional.all_reduce(found, sequences.ring.group) if sequences.ring.size > 1 else found


def _positions(values: Tensor, sequences: ShardedSequences, caller: str) -> Tensor:
    """Return the positions that this rank holds, [L]; raise unless `values` has as many."""
    length = sequences.layout.local_length
    if not isinstance(values, Tensor) or values.ndim < 2 or values.shape[1] != length:
        came = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InvalidArgumentError(
            f"{caller} takes values [B, {length}, ...] of the {length} positions that this rank "
            f"holds, got {came}"
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
