"""Ranks that train a case, and what they hold."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.parallel.data_parallel import parameter_shards, shard_optimizer
from scaletorch.parallel.data_parallel.building import ShardedGradient
from scaletorch.parallel.pg_manager import (
    ProcessGroupManager,
    destroy_process_group_manager,
    setup_process_group_manager,
)

from .drawing import Case
from .models import model_of


def storage(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the memory under some tensors."""
    memory = [t.untyped_storage() for t in tensors if t is not None]
    return sum({each.data_ptr(): each.nbytes() for each in memory}.values())


def on_grid(case: Case, run):
    """Return `run(case, manager)` on the grid of a case."""
    layout = case.layout
    sizes = {f"{axis}_size": getattr(layout.grid, axis) for axis in ("tp", "cp", "pp", "dp", "ep")}
    manager = setup_process_group_manager(**sizes)
    try:
        return run(case, manager)
    finally:
        destroy_process_group_manager()


def prepared(case: Case, manager: ProcessGroupManager):
    """Return the model of a case on the grid, and its optimizer."""
    layout = case.layout
    torch.manual_seed(0)
    grad_type = {None: None, 4: torch.float32, 8: torch.float64}[case.sum_item]
    model = parallelize(
        model_of(case), manager, **layout.arguments(), data_parallel={"grad_type": grad_type},
        rehearse=False,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    if layout.zero:
        shard_optimizer(optimizer, model, stage=layout.zero)
    return model, optimizer


def batch_of(case: Case, manager: ProcessGroupManager):
    """Return this rank's micro-batches."""
    layout = case.layout
    rows = layout.micro_rows * layout.micro_batches * manager.dp_size
    tokens = torch.randint(64, (rows, case.length + 1), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    return shard_global_batch(batch, layout.micro_batches, manager)


def step(case, model, optimizer, manager) -> None:
    """Train a step."""
    optimizer.zero_grad()
    train_step(model, batch_of(case, manager), manager)
    optimizer.step()


def held(model, optimizer) -> list[int]:
    """Return the bytes of parameters, of gradients and of the optimizer's state."""
    shards = parameter_shards(model)
    gradients = [s.tensor.grad for s in shards] + [p.grad for p in model.parameters()]
    buckets = [b for each in model.bucket_managers for b in each.buckets]
    kept = [memory for b in buckets for memory in (b._spare, b._buffer)]
    states = [x for state in optimizer.state.values() for x in state.values()]
    masters = [s.tensor for s in shards if s.is_master]
    return [
        storage(model.parameters()),
        storage([g for g in gradients if not isinstance(g, ShardedGradient)] + kept),
        storage(states + masters),
    ]
