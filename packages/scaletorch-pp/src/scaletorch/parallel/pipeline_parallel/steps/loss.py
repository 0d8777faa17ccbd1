"""The default loss of a step: token losses over valid tokens of the global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....dist.dist import all_reduce
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank, get_process_group_manager
from ..stages.compare import tensor_of

IGNORED = -100

Batch = Mapping[str, Any]
LossFunction = Callable[[Any, Batch], Tensor]


def token_mean_loss(batches: Iterable[Batch], device: torch.device) -> LossFunction:
    """Return the loss of one micro-batch: its token losses over all valid tokens of the step.

    These are the tokens of all ``batches``, and of all ranks of the manager's CP x DP group where
    there is one, so that losses and gradients add up over micro-batches and ranks.

    Args:
        batches: this step's micro-batches; ``labels`` [B, L] are aligned with the outputs, and
            -100 marks tokens that do not count.
        device: where the loss is computed.
    """
    count = torch.zeros((), dtype=torch.int64, device=device)
    for batch in batches:
        count += (batch["labels"] != IGNORED).sum().to(device)
    manager = get_process_group_manager()
    if manager is not None:
        all_reduce(count, group=manager.cp_dp_group)
    count.clamp_(min=1)

    def loss(output: Any, batch: Batch) -> Tensor:
        return token_loss_sum(tensor_of(output), batch["labels"].to(device)) / count

    return loss


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum the cross entropies of all valid tokens, in float32 at least.

    Args:
        logits: [B, L, V].
        labels: [B, L] int64, -100 where there is none.

    Raises:
        InvalidArgumentError: shapes that do not belong together.
    """
    if logits.shape[:-1] != labels.shape:
        raise InvalidArgumentError(
            f"{describe_rank()}: labels of shape {tuple(labels.shape)} do not fit an output of "
            f"shape {tuple(logits.shape)}: expected [B, L] and [B, L, V]; pass loss_fn=... for "
            "another loss"
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
