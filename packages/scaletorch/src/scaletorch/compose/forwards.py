"""Forwards of a step without gradients, and what a loss sums and counts in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..dist import all_reduce, get_comm_device
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.pg_manager.building import evaluating
from ..parallel.pipeline_parallel import pipeline_forward
from .batches import Batch
from .forward import terms_of
from .own_loss import LossFunction, OwnLoss
from .ready import look_first, ready, size_of


def losses_per_item(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    loss_fn: LossFunction,
) -> float:
    """Return how many losses a loss_fn counts for each token of a batch, or row of another.

    The model is called in its own mode, and may change itself and the random generators. A mistake
    in the loss is left to the step, and counts as one for each.
    """
    own = OwnLoss(loss_fn, None, model, manager, trains=False)
    _, count, size = _summed(model, micro_batches, manager, own, evaluates=False).tolist()
    return count / size if 0 < count < math.inf else 1.0


def totals(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    loss_fn: LossFunction,
) -> list[Tensor]:
    """Return the sum of a global batch's losses and their count, in float64.

    Raises:
        InvalidArgumentError: The loss_fn's return does not do.
        MismatchError: Another rank has raised, or its sum differs.
    """
    own = OwnLoss(loss_fn, None, model, manager, trains=False)
    total, count, _ = _summed(model, micro_batches, manager, own, evaluates=True)
    return [total, count]


def _summed(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    own: OwnLoss,
    *,
    evaluates: bool,
) -> Tensor:
    """Return the sum of all ranks' losses, their count, and the batch's size; [3], float64.

    Mistakes in the loss are raised on every rank if it is evaluated.
    """
    device = get_comm_device(manager.world_group)

    def part(output: Any, batch: Any) -> Tensor:
        found = (*own.call(output, batch), size_of(batch))
        return torch.stack([torch.as_tensor(x).reshape(()).double().to(device) for x in found])

    parts = forwards(model, micro_batches, manager, part, own, evaluates=evaluates)
    total = sum(parts, torch.zeros(3, dtype=torch.float64, device=device))
    if evaluates:
        own.settle(total[0])
    if manager.tp_rank:
        total.zero_()
    all_reduce(total, group=manager.world_group)
    return total


def forwards(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    each: Callable[[Any, Any], Tensor],
    own: OwnLoss | None = None,
    *,
    evaluates: bool = True,
) -> list[Tensor]:
    """Return what `each` makes of every output, on ranks of the last stage."""
    terms = terms_of(model)
    with evaluating(model) if evaluates else nullcontext(), torch.no_grad():
        called, _ = ready(model, micro_batches, manager, terms, own, False)
        look_first(model, micro_batches, called, manager, terms)
        return pipeline_forward(model, called, group=manager.pp_group, each=each)
