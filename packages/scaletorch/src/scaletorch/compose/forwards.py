"""Forwards of a step without gradients, and what a loss sums and counts in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..dist import all_reduce, get_comm_device
from ..dist.errors import InvalidArgumentError
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.pg_manager.building import evaluating
from ..parallel.pipeline_parallel import pipeline_forward
from .batches import Batch
from .forward import terms_of
from .own_loss import NOTHING_COUNTS, LossFunction, OwnLoss
from .ready import look_first, ready, size_of


def losses_per_item(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    loss_fn: LossFunction,
) -> float:
    """Return how many losses a loss_fn counts for each token of a batch, or row of another.

    The model is called in its own mode, and may change itself and the random generators.

    Raises:
        InvalidArgumentError: As `eval_step`.
        MismatchError: As `eval_step`.
    """
    _, count, size = totals(model, micro_batches, manager, loss_fn, evaluates=False)
    if not count:
        raise InvalidArgumentError(NOTHING_COUNTS)
    return float(count) / float(size)


def totals(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    loss_fn: LossFunction,
    *,
    evaluates: bool = True,
) -> list[Tensor]:
    """Return the sum of a global batch's losses, their count, and its size, in float64."""
    own = OwnLoss(loss_fn, None, model, manager, trains=False)
    device = get_comm_device(manager.world_group)

    def part(output: Any, batch: Any) -> Tensor:
        found = (*own.call(output, batch), size_of(batch))
        return torch.stack([torch.as_tensor(x).reshape(()).double().to(device) for x in found])

    parts = forwards(model, micro_batches, manager, part, own, evaluates=evaluates)
    total = sum(parts, torch.zeros(3, dtype=torch.float64, device=device))
    own.settle(total[0])
    if manager.tp_rank:
        total.zero_()
    all_reduce(total, group=manager.world_group)
    return [*total]


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
