"""The default loss of a step: token losses over valid tokens of the global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....dist.dist import all_reduce
from ...pg_manager import IGNORED, get_process_group_manager, token_loss_sum
from ..runtime.forms import tensor_of

Batch = Mapping[str, Any]
LossFunction = Callable[[Any, Batch], Tensor]


def token_mean_loss(
    batches: Iterable[Batch], device: torch.device, group: ProcessGroup | None
) -> LossFunction:
    """Return the loss of one micro-batch: its token losses divided by all valid tokens of the step.

    These are the tokens of all `batches`. If the pipeline is the manager's pp axis, they are also
    those of the other ranks of its CP x DP group, so that losses and gradients add up over
    micro-batches and ranks. A pipeline over another group has no such ranks that it knows of.

    Args:
        batches: This step's micro-batches; `labels` [B, L] are aligned with the outputs, and -100
            marks tokens that do not count.
        device: Device on which the loss is computed.
        group: The pipeline's ranks.
    """
    count = torch.zeros((), dtype=torch.int64, device=device)
    for batch in batches:
        count += (batch["labels"] != IGNORED).sum().to(device)
    manager = get_process_group_manager()
    if manager is not None and group is manager.group("pp"):
        all_reduce(count, group=manager.cp_dp_group)
    count.clamp_(min=1)

    def loss(output: Any, batch: Batch) -> Tensor:
        return token_loss_sum(tensor_of(output), batch["labels"].to(device)) / count

    return loss
