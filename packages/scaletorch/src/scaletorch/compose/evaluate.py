"""Evaluate without gradients: the loss of a global batch, or a function of a model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..dist import all_reduce, get_comm_device
from ..dist.building import agree
from ..dist.errors import InvalidArgumentError
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.pipeline_parallel import pipeline_forward
from .batches import Batch
from .forward import manager_of, terms_of
from .loss import LossBatch, find_sharded_head, loss_of_tokens
from .own_loss import NOTHING_COUNTS, LossFunction, OwnLoss
from .preparation import prepare_step


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode inside the block; then restore each module's mode."""
    modes = {module: module.training for module in (model, *model.modules())}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
            twin = vars(module).get("_twin")  # of a module of another stage
            if isinstance(twin, nn.Module):
                twin.train(mode)


def forwards(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager,
    function: Callable[[Any, Any], Tensor],
    own_loss: OwnLoss | None = None,
) -> list[Tensor]:
    """Return `function(output, batch)` for every micro-batch, on ranks of the last stage."""
    with evaluating(model), torch.no_grad():
        called, _ = prepare_step(model, micro_batches, manager, terms_of(model), own_loss, False)
        return pipeline_forward(model, called, group=manager.pp_group, each=function)


def eval_step(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    manager: ProcessGroupManager | None = None,
    *,
    loss_fn: LossFunction | None = None,
) -> Tensor:
    """Return the loss of one global batch, without gradients and with the model in eval mode.

    Args:
        model: The model that `parallelize` returned.
        micro_batches: This rank's micro-batches, from `shard_global_batch`; rows that only fill up
            a batch have labels of -100.
        manager: The grid; by default the model's.
        loss_fn: As for `train_step`; the count may depend on the output.

    Returns:
        Sum of the losses / their count over the whole global batch, equal on every rank: 0-d,
        float64. For the loss of tokens, its exponential is the perplexity.

    Raises:
        InvalidArgumentError: The count is 0, or as in `train_step`.
        MismatchError: As in `train_step`.
    """
    manager = manager_of(model, manager)
    own_loss = OwnLoss(loss_fn or loss_of_tokens, None, model, manager, trains=False)
    device = get_comm_device(manager.world_group)

    def pair(output: Any, batch: Any) -> Tensor:
        found = own_loss.call(output, batch)
        return torch.stack([torch.as_tensor(x).reshape(()).double().to(device) for x in found])

    pairs = forwards(model, micro_batches, manager, pair, own_loss)
    both: Tensor = sum(pairs, torch.zeros(2, dtype=torch.float64, device=device))
    own_loss.settle(both[0])
    if manager.tp_rank:
        both.zero_()
    all_reduce(both, group=manager.world_group)
    total, count = both.unbind()
    if not count:
        raise InvalidArgumentError(NOTHING_COUNTS)
    return total / count


def forward_step(
    model: DataParallelBucket,
    micro_batches: Sequence[Batch],
    function: Callable[[Any, Any], Tensor],
    manager: ProcessGroupManager | None = None,
) -> list[Tensor | None]:
    """Return a function of each micro-batch's output, without gradients, in eval mode.

    Use it for a second model, such as a teacher or the reference model of DPO: put the results into
    the micro-batches as entries `loss_...`, and the loss_fn of the model that trains can read them.

    Args:
        model: The model that `parallelize` returned.
        micro_batches: This rank's micro-batches, from `shard_global_batch`.
        function: Called with a micro-batch's output and the micro-batch, like a loss_fn.
        manager: The grid; by default the model's.

    Returns:
        One result per micro-batch on ranks of the last stage; one None per micro-batch elsewhere.

    Raises:
        Exception: An error that the function raises, after all forwards have run.
        InvalidArgumentError: As in `train_step`.
        MismatchError: As in `train_step`, or the function has failed on another rank.
    """
    manager = manager_of(model, manager)
    head = find_sharded_head(model)
    problem: list[Exception] = []

    def result(output: Any, batch: Any) -> Tensor:
        try:
            return function(output, LossBatch(batch.micro_batch, head, manager))
        except Exception as error:  # raised after all forwards, so that all ranks raise
            problem.append(error)
            return torch.zeros(())

    found: list[Tensor | None] = [*forwards(model, micro_batches, manager, result)]
    del problem[1:]
    # Popped, since the error's traceback refers to this frame and thus to the list.
    agree("this forward_step", [], manager.world_group, error=problem.pop() if problem else None)
    return found or [None] * len(micro_batches)
