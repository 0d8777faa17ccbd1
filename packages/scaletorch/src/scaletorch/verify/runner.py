"""One case on its ranks, each of which compares what it holds with one process's run."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

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
from ..dist import all_gather_object, get_rank
from ..dist.ranks.locate import Locator, find
from ..parallel.data_parallel import DataParallelBucket, shard_optimizer
from ..parallel.pg_manager import (
    ProcessGroupManager,
    destroy_process_group_manager,
    setup_process_group_manager,
)
from ..parallel.pipeline_parallel import Split
from ..parallel.tensor_parallel import load_full_state_dict, split_by_owner, take_own
from . import dropout
from .cases import Case
from .compare import Difference, compare_named, compare_tensor
from .precision import model_precision
from .problem import MAX_NORM, SGD_STEPS, TORCH_DTYPES, make_optimizer
from .replicas import doubled, missing, unlike

SHOWN = 3  # failures that a rank reports
WRAPPER: Mapping[str, Mapping[str, Any]] = {
    "rank_order": {"order": "rank"},
    "float64": {"grad_type": torch.float64},
}
STAGES = {"zero1": 1, "zero2": 2}


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank found.

    Attributes:
        compared: how many tensors it compared.
        worst: the one nearest to its bound, or beyond it.
        failures: the first and furthest off that rounding does not explain.
        bitwise: of how many all bits agree.
    """

    compared: int
    worst: Difference
    failures: list[Difference]
    bitwise: int


@dataclass(frozen=True, slots=True)
class Subject:
    """What is verified, as ranks need it.

    Attributes:
        model_fn: makes the plain model.
        plan: tensor parallel plan; None recognises the model's family.
        split: pipeline split; None infers it.
    """

    model_fn: Locator
    plan: Mapping[str, Any] | None
    split: Split | None


def run_case(case: Case, subject: Subject, reference: str) -> RankReport:
    """Train as one rank of ``case`` and compare every step with one process's.

    Args:
        case: what to run.
        subject: what to run it with.
        reference: file with the plain checkpoint, the batches and one process's steps.
    """
    grid = case.grid
    manager = setup_process_group_manager(grid.tp, grid.cp, grid.pp, grid.dp)
    try:
        found = list(compare_case(case, subject, load_reference(reference), manager))
    finally:
        destroy_process_group_manager()
    found = [replace(difference, rank=get_rank()) for difference in found]
    # What went wrong first tells most: a loss before gradients, and the furthest off of these.
    failures = sorted(
        (difference for difference in found if difference.failed),
        key=lambda difference: (difference.step, difference.what != "loss", -difference.severity),
    )
    worst = max(found, key=lambda difference: difference.severity)
    return RankReport(len(found), worst, failures[:SHOWN], sum(d.bitwise for d in found))


@functools.lru_cache(maxsize=2)
def load_reference(path: str) -> Mapping[str, Any]:
    """Return what one process left; nobody may change its tensors."""
    saved: Mapping[str, Any] = torch.load(path, weights_only=True, mmap=True)
    return saved


def compare_case(
    case: Case, subject: Subject, saved: Mapping[str, Any], manager: ProcessGroupManager
) -> Iterator[Difference]:
    """Build the model, compare its initial weights, its training and its dropout."""
    model = find(subject.model_fn)().to(TORCH_DTYPES[case.dtype])
    shard = functools.partial(take_own, model)
    yield from compare_named("initial weight", 0, model.state_dict(), saved["state"], 0.0, shard)
    load_full_state_dict(model, saved["state"])
    parallel = parallelize(
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
    dropout.switch(parallel, on=False)
    yield from train_and_compare(case, parallel, manager, saved)
    if saved["dropout"]:
        yield from compare_dropout(case, parallel, manager, saved)


def train_and_compare(
    case: Case,
    model: DataParallelBucket,
    manager: ProcessGroupManager,
    saved: Mapping[str, Any],
) -> Iterator[Difference]:
    """Train through all steps; compare this rank's part after each, and the whole at the end."""
    shard = functools.partial(take_own, model)
    mine = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    stages: list[set[str]] = all_gather_object(mine, manager.pp_group)
    yield from doubled(stages, model.tied_parameters, saved["bound"])
    for step, (batch, theirs) in enumerate(zip(saved["batches"], saved["steps"], strict=True)):
        bound = saved["bound"] * (step + 1)  # what a step's weights are off by enters the next
        micro_batches = shard_global_batch(
            batch, case.micro_batches, manager, cp_layout=case.cp_layout
        )
        optimizer = make_optimizer(model, step)
        if stage := STAGES.get(case.data_parallel):
            shard_optimizer(optimizer, model, stage=stage, overlap=True)
        with model_precision(TORCH_DTYPES[case.dtype]):
            loss = train_step(model, micro_batches, manager)
        yield compare_tensor("loss", step, loss, theirs["loss"], bound)
        gradients = local_gradients(model)
        expected = set(theirs["gradients"])
        yield from missing("gradient", step, set().union(*stages), expected, bound)
        yield from missing("gradient", step, gradients, expected & mine, bound)
        yield from compare_named("gradient", step, gradients, theirs["gradients"], bound, shard)
        yield from unlike("gradient", step, split_by_owner(model, gradients), bound)
        if step < SGD_STEPS:
            norm = global_grad_norm(model, manager)
        else:
            norm = clip_grad_norm_(model, MAX_NORM, manager)
        optimizer.step()
        optimizer.zero_grad()
        yield compare_tensor("norm", step, norm, theirs["norm"], bound)
        yield from compare_named(
            "weight", step, model.state_dict(), theirs["weights"], bound, shard
        )
    weights = full_state_dict(model, manager)
    yield from missing("whole weight", step, weights, theirs["weights"], bound)
    yield from compare_named("whole weight", step, weights, theirs["weights"], bound)


def compare_dropout(
    case: Case,
    model: DataParallelBucket,
    manager: ProcessGroupManager,
    saved: Mapping[str, Any],
) -> Iterator[Difference]:
    """Run one more step with dropout and compare what the ranks drop."""
    dropout.switch(model, on=True)
    seed_ranks(0, manager)
    micro_batches = shard_global_batch(
        saved["batches"][0], case.micro_batches, manager, cp_layout=case.cp_layout
    )
    with dropout.recorded(model, (manager.dp_rank, manager.cp_rank)) as draws:
        train_step(model, micro_batches, manager)
    yield from dropout.judge(draws, len(saved["steps"]))
