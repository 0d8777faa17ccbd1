"""One rank's model, training and comparisons, in a case of the proof."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..compose import (
    clip_grad_norm_,
    full_state_dict,
    global_grad_norm,
    local_gradients,
    parallelize,
    seed_ranks,
    shard_global_batch,
    train_step,
)
from ..dist import all_gather_object
from ..dist.building import Locator
from ..parallel.data_parallel import DataParallelBucket, shard_optimizer
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.pipeline_parallel import Split
from . import dropout
from .bounds import bound
from .cases import Case
from .compare import Difference, compare_named, compare_tensor
from .experts import own_part, split_by_holder
from .phases import MAX_NORM, Phase, phase_at
from .precision import model_precision
from .problem import TORCH_DTYPES
from .refusal import refusing
from .replicas import doubled, missing, unlike
from .routing import Choice, flips, watched

WRAPPER: Mapping[str, Mapping[str, Any]] = {
    "rank_order": {"order": "rank"},
    "float64": {"grad_type": torch.float64},
}
SHARDED: Mapping[str, Mapping[str, Any]] = {
    "zero1": {"stage": 1, "overlap": True},
    "zero2": {"stage": 2, "overlap": True},
    "zero1_waiting": {"stage": 1},
}


@dataclass(frozen=True, slots=True)
class Subject:
    """What is verified, as ranks need it.

    Attributes:
        model_fn: Makes the plain model.
        plan: Of tensor parallelism and of experts; None recognises the model's family.
        split: Pipeline split; None infers it.
    """

    model_fn: Locator
    plan: Mapping[str, Any] | None
    split: Split | None


def build(
    case: Case, model: nn.Module, subject: Subject, manager: ProcessGroupManager
) -> DataParallelBucket:
    """Return the model on the case's layout, with its options."""
    return parallelize(
        model,
        manager,
        plan=subject.plan,
        split=subject.split,
        schedule=case.schedule,
        bucket_size=case.bucket_size,
        recompute=case.recompute == "layers",
        sequence_parallel=case.sequence_parallel == "on",
        loss_parallel=case.loss_parallel == "on",
        cp_layout=case.cp_layout,
        cp_method=case.cp_method,
        data_parallel=WRAPPER.get(case.data_parallel),
    )


def divide(
    case: Case, batch: Mapping[str, Tensor], model: DataParallelBucket
) -> list[Mapping[str, Tensor]]:
    """Return this rank's micro-batches of a global batch."""
    return shard_global_batch(batch, case.micro_batches, model=model)


def train_and_compare(
    case: Case,
    model: DataParallelBucket,
    manager: ProcessGroupManager,
    saved: Mapping[str, Any],
) -> Generator[Difference, None, bool]:
    """Train; compare this rank's part after each step, and the whole at the end.

    Ends with the first step in which a rank finds a fault: what follows from it tells nothing new.
    Returns whether none was found in a step.
    """
    stages = names_of_stages(model, manager)
    dtype = TORCH_DTYPES[case.dtype]
    yield from doubled(stages, model.tied_parameters, bound(dtype, saved["chain"], 0))
    for step, (batch, theirs) in enumerate(zip(saved["batches"], saved["steps"], strict=True)):
        limit = bound(dtype, saved["chain"], step)
        phase, first = phase_at(step)
        if first:
            optimizer = optimizer_of(case, phase, model)
        near = [Choice(*each) for each in saved["doubtful"][step]]
        refused = refusing() if step == 0 else nullcontext()
        with refused, model_precision(dtype), watched(on=bool(near)) as choices:
            loss = train_step(model, divide(case, batch, model), manager)
        found = [compare_tensor("loss", step, loss, theirs["loss"], limit)]
        found += flips(choices, near, step, limit)
        found += compare_gradients(step, model, theirs["gradients"], stages, limit, manager)
        norm = norm_of(model, manager, clips=phase.clips)
        found.append(compare_tensor("norm", step, norm, theirs["norm"], limit))
        optimizer.step()
        optimizer.zero_grad()
        part = own_part(model)
        found += compare_named("weight", step, model.state_dict(), theirs["weights"], limit, part)
        yield from found
        if any(all_gather_object(any(difference.failed for difference in found))):
            return False
    weights = full_state_dict(model, manager)
    yield from missing("whole weight", step, weights, theirs["weights"], limit)
    yield from compare_named("whole weight", step, weights, theirs["weights"], limit)
    return True


def names_of_stages(model: nn.Module, manager: ProcessGroupManager) -> list[set[str]]:
    """Return the names of each pipeline stage's parameters, of all its ranks together."""
    mine = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    stages: list[set[str]] = [set() for _ in range(manager.pp_size)]
    for stage, names in all_gather_object((manager.pp_rank, mine)):
        stages[stage] |= names  # ranks have other experts, if these are modules in a list
    return stages


def optimizer_of(case: Case, phase: Phase, model: DataParallelBucket) -> Optimizer:
    """Return a phase's optimizer of this rank's parameters, sharded where the case says so."""
    optimizer = phase.make(model.parameters())
    if options := SHARDED.get(case.data_parallel):
        shard_optimizer(optimizer, model, **options)
    return optimizer


def norm_of(model: DataParallelBucket, manager: ProcessGroupManager, *, clips: bool) -> Tensor:
    """Return the norm of the whole gradient, which is clipped then where `clips` says so."""
    if clips:
        return clip_grad_norm_(model, MAX_NORM, manager)
    return global_grad_norm(model, manager)


def compare_gradients(
    step: int,
    model: DataParallelBucket,
    theirs: Mapping[str, Tensor],
    stages: Iterable[set[str]],
    limit: float,
    manager: ProcessGroupManager,
) -> Iterator[Difference]:
    """Compare this rank's gradients with one process's, and with those of ranks that have them."""
    gradients, expected = local_gradients(model), set(theirs)
    mine = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    yield from missing("gradient", step, set().union(*stages), expected, limit)
    yield from missing("gradient", step, gradients, expected & mine, limit)
    yield from compare_named("gradient", step, gradients, theirs, limit, own_part(model))
    yield from unlike("gradient", step, split_by_holder(model, gradients, manager), limit)


def compare_dropout(
    case: Case,
    model: DataParallelBucket,
    manager: ProcessGroupManager,
    saved: Mapping[str, Any],
) -> Iterator[Difference]:
    """Run one more step with dropout and compare what the ranks drop."""
    dropout.switch(model, on=True)
    seed_ranks(0, manager)
    with dropout.recorded(model, (manager.dp_rank, manager.cp_rank)) as draws:
        train_step(model, divide(case, saved["batches"][0], model), manager)
    yield from dropout.judge(draws, len(saved["steps"]))
