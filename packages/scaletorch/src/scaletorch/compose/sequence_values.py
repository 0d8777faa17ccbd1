"""What a loss takes of whole sequences, of which each cp rank holds some positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dist import functional
from ..dist.errors import InvalidArgumentError
from ..parallel.context_parallel import ShardedSequences
from .loss_batch import require_sequences


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
