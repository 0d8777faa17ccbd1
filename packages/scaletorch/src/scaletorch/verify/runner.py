"""One case on its ranks, each of which compares what it holds with one process's run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..compose import (
    clip_grad_norm_,
    full_state_dict,
    global_grad_norm,
    parallelize,
    shard_global_batch,
    train_step,
)
from ..dist import all_gather_object, get_rank
from ..dist.ranks.locate import Locator, find
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.pg_manager import (
    ProcessGroupManager,
    destroy_process_group_manager,
    setup_process_group_manager,
)
from ..parallel.pipeline_parallel import Split
from ..parallel.tensor_parallel import shard_dims
from .cases import Case
from .compare import Difference, compare_named, compare_tensor, missing
from .problem import MAX_NORM, SGD_STEPS, TORCH_DTYPES, make_optimizer

SHOWN = 3  # failures that a rank reports


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank found.

    Attributes:
        compared: how many tensors it compared.
        worst: the one nearest to its bound, or beyond it.
        failures: the first that rounding does not explain.
        bitwise: whether all bits of all tensors agree.
    """

    compared: int
    worst: Difference
    failures: list[Difference]
    bitwise: bool


@dataclass(frozen=True, slots=True)
class Subject:
    """What is verified, as ranks need it.

    Attributes:
        model_fn: makes the plain model.
        hidden_size: last dim of the hidden states between stages.
        plan: tensor parallel plan; None recognises the model's family.
        split: pipeline split; None infers it.
    """

    model_fn: Locator
    hidden_size: int
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
        saved = torch.load(reference, weights_only=True, mmap=True)
        plain = find(subject.model_fn)().to(TORCH_DTYPES[case.dtype])
        plain.load_state_dict(saved["state"])
        model = parallelize(
            plain, manager, plan=subject.plan, split=subject.split, bucket_size=case.bucket_size
        )
        found = list(train_and_compare(case, model, manager, saved, subject.hidden_size))
    finally:
        destroy_process_group_manager()
    found = [replace(difference, rank=get_rank()) for difference in found]
    failures = [difference for difference in found if difference.failed]
    worst = max(found, key=lambda difference: difference.severity)
    return RankReport(len(found), worst, failures[:SHOWN], all(d.bitwise for d in found))


def train_and_compare(
    case: Case,
    model: DataParallelBucket,
    manager: ProcessGroupManager,
    saved: Mapping[str, Any],
    hidden_size: int,
) -> Iterator[Difference]:
    """Train through all steps; compare this rank's part after each, and the whole at the end."""
    dims = shard_dims(model)

    def shard(name: str, full: Tensor) -> Tensor:
        dim = dims.get(name)
        return full if dim is None else full.tensor_split(manager.tp_size, dim)[manager.tp_rank]

    for step, (batch, theirs) in enumerate(zip(saved["batches"], saved["steps"], strict=True)):
        bound = saved["bound"] * (step + 1)  # what a step's weights are off by enters the next
        micro_batches = shard_global_batch(batch, case.micro_batches, manager)
        loss = train_step(
            model, micro_batches, manager, hidden_size=hidden_size, schedule=case.schedule
        )
        named = model.named_parameters(remove_duplicate=False)
        gradients = {name: p.grad for name, p in named if p.grad is not None}
        held = set().union(*all_gather_object(set(gradients), manager.pp_group))
        yield compare_tensor("loss", step, loss, theirs["loss"], bound)
        yield from missing("gradient", step, held, theirs["gradients"], bound)
        yield from compare_named("gradient", step, gradients, theirs["gradients"], bound, shard)
        optimizer = make_optimizer(model, step)
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
