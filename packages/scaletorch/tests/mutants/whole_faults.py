"""Faults of what needs the strategies together: composing, the loss, the norm, random draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scaletorch.parallel.pg_manager import ProcessGroupManager, get_process_group_manager

from .mutant import Catalogue

WHOLE = Catalogue("compose", "2x1x1x1")
fault = WHOLE.fault
GRADIENTS = "synchronisation: gradients"
UNLIKE_SEEN = "own_loss:_require_agreement"  # finds a loss that tensor-parallel ranks do not share


@fault("parallelize:DataParallelBucket", born=GRADIENTS)
def gradients_averaged(wrapper: Any, *args: Any, **options: Any) -> Any:
    """Gradients are averaged over ranks although the loss is divided already."""
    return wrapper(*args, **options, op="mean")


@fault("parallelize:DataParallelBucket", layout="2x1x2x1", born=GRADIENTS)
def gradients_not_summed_over_cp(wrapper: Any, stage: Any, **options: Any) -> Any:
    """Gradients are summed over one axis of dp and cp alone."""
    manager = get_process_group_manager()
    return wrapper(stage, **options | {"group": manager and manager.dp_group})


@fault("parallelize:DataParallelBucket", dtype="float32", born=GRADIENTS)
def gradients_travel_in_bfloat16(wrapper: Any, *args: Any, **options: Any) -> Any:
    """Gradients are summed in bfloat16 where float32 is promised."""
    return wrapper(*args, **{"grad_type": torch.bfloat16} | options)


@fault("step:prepare_step", layout="1x1x2x1", born="forward: loss")
def loss_times_cp(ready: Any, *args: Any) -> Any:
    """The loss is larger by the context-parallel size."""
    called, count = ready(*args)
    return called, count // 2


@fault("step:prepare_step", born="forward: loss")
def mean_of_local_means(ready: Any, *args: Any) -> Any:
    """Every rank divides by its own valid tokens, and the means are averaged."""
    called, _ = ready(*args)
    return called, 2 * sum(int((batch["labels"] != -100).sum()) for batch in called)


@fault("step:token_loss_sum", "loss:token_loss_sum", layout="4x1x1x1", born="forward: loss")
def masked_rank_gives_nan(loss_sum: Any, output: Tensor, labels: Tensor, _head: Any) -> Tensor:
    """A rank without a valid token divides nothing by nothing."""
    mean = F.cross_entropy(output.flatten(0, -2), labels.flatten())
    return mean * (labels != -100).sum()


@fault("step:_summed", born="forward: loss")
def loss_of_one_rank(summed: Any, loss: Any, manager: Any) -> Any:
    """The loss that a rank reports is its own part of it."""
    return loss


@fault(
    "loss:vocab_parallel_cross_entropy",
    UNLIKE_SEEN,
    layout="1x1x1x2",
    loss_parallel="on",
    born="forward: loss",
)
def loss_of_own_vocabulary(loss: Any, *given: Any, **options: Any) -> Tensor | None:
    """A rank's loss knows its own part of the vocabulary alone, and no rank compares."""
    if loss.__name__ == "_require_agreement":
        return None
    logits, labels = given
    beyond = labels >= logits.shape[-1]
    flat = labels.masked_fill(beyond, -100).flatten()
    return F.cross_entropy(logits.flatten(0, -2), flat, reduction=options["reduction"])


@fault("gradients:is_sharded", data_parallel="zero1", born="update: norm")
def norm_of_own_shards(is_sharded: Any, model: Any) -> Any:
    """The gradient norm counts one rank's shards alone."""
    return False


@fault("gradients:counted_gradients", layout="1x1x1x2", born="update: norm")
def norm_counts_replicas(counted: Any, model: Any, _manager: Any) -> Any:
    """The gradient norm counts parameters once on every rank that holds them."""
    return (p.grad for p in model.parameters() if p.grad is not None)


@fault("gradients:counted_gradients", layout="1x2x1x1", born="update: norm")
def norm_counts_tied_twice(
    counted: Any, model: Any, manager: ProcessGroupManager
) -> Iterator[Tensor]:
    """The gradient norm counts a tied parameter on each stage that has it."""
    yield from counted(model, manager)
    tied = model.tied_parameters
    yield from (p.grad for n, p in model.named_parameters() if n in tied and manager.pp_rank)


@fault("gradients:norm_over", layout="1x2x1x1", born="update: norm | clip")
def norm_of_one_stage(
    norm_over: Any, gradients: Any, groups: Any, model: Any, norm_type: Any
) -> Any:
    """Every stage clips by the norm of its own gradients."""
    return norm_over(gradients, [], model, norm_type)


@fault("draws:_place")
def dropout_alike_over_dp(place: Any, manager: Any) -> Any:
    """Data-parallel ranks drop the same elements of different rows."""
    return (0, *place(manager)[1:])


@fault("draws:_place", layout="1x1x2x1")
def dropout_alike_over_cp(place: Any, manager: Any) -> Any:
    """Context-parallel ranks drop the same elements of different positions."""
    return (*place(manager)[:-1], 0)


@fault("draws:_place", layout="1x2x1x1")
def dropout_alike_over_pp(place: Any, manager: Any) -> Any:
    """Stages drop the same elements of different layers."""
    return (manager.dp_rank, 0, manager.cp_rank)


@fault("draws:_place", layout="1x1x1x2")
def dropout_differs_on_replicas(place: Any, manager: Any) -> Any:
    """Tensor-parallel ranks drop different elements of what all of them hold."""
    return (*place(manager), manager.tp_rank)


@fault("recompute:checkpoint", recompute="layers")
def dropout_drawn_anew(checkpoint: Any, *args: Any, **options: Any) -> Any:
    """A recomputed layer drops other elements than it did in forward."""
    return checkpoint(*args, **{"preserve_rng_state": False} | options)
