"""The ways to train one model on all ranks: tables of wrappers and optimizers by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from scaletorch.dist import use_hierarchy
from scaletorch.parallel.data_parallel import (
    DataParallelBucket,
    DataParallelNaive,
    shard_optimizer,
)

from .alternatives import (
    AutocastDDP,
    FlatAllReduce,
    MainGradients,
    MainGradientsDDP,
    fsdp2,
)
from .trainer import Way

ALONE, DDP, OURS = "compute alone", "DDP", "ours"  # names of our ways begin with OURS
ADAMW: dict[str, Any] = {"lr": 1e-4, "foreach": True}


def _alone(model: nn.Module, group: ProcessGroup) -> nn.Module:
    return model


def _ddp(model: nn.Module, group: ProcessGroup, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, process_group=group, **options)


def _ours(model: nn.Module, group: ProcessGroup, **options: Any) -> nn.Module:
    return DataParallelBucket(model, group=group, **options)


def _at_the_end(model: nn.Module, group: ProcessGroup, **options: Any) -> nn.Module:
    """Wrap without overlap: if wrappers share a group, ours reduce at the end of backward."""
    wrapper: Any = _ours(model, group, **options)
    wrapper.neighbours = [_ours(nn.Linear(1, 1), group)]
    return wrapper  # type: ignore[no-any-return]


def _naive(model: nn.Module, group: ProcessGroup) -> nn.Module:
    return DataParallelNaive(model, group=group)


def _adamw(module: nn.Module, group: ProcessGroup) -> Optimizer:
    return AdamW(module.parameters(), **ADAMW)


def _zero_adamw(module: nn.Module, group: ProcessGroup, **options: Any) -> Optimizer:
    every: Any = {"process_group": group, **ADAMW, **options}
    return ZeroRedundancyOptimizer(module.parameters(), AdamW, **every)


def _sharded_adamw(module: Any, group: ProcessGroup, **options: Any) -> Optimizer:
    return shard_optimizer(_adamw(module, group), module, **options)


def _gradients_only(module: nn.Module, group: ProcessGroup) -> Optimizer:
    """Shard the gradients, in float32, and update nothing."""
    optimizer: Any = _sharded_adamw(module, group)
    optimizer.step = lambda: None
    return optimizer  # type: ignore[no-any-return]


GRADIENTS = {
    ALONE: Way(_alone),
    DDP: Way(_ddp),
    "DDP, views": Way(partial(_ddp, gradient_as_bucket_view=True)),
    "DDP, 100 MB": Way(partial(_ddp, bucket_cap_mb=100)),
    "flat all-reduce": Way(FlatAllReduce),
    "FSDP2": Way(fsdp2),
    OURS: Way(_ours),
    f"{OURS}, mean": Way(partial(_ours, op="mean")),
    f"{OURS}, 2**22": Way(partial(_ours, bucket_size=2**22)),
}

_ours_mixed = partial(_ours, grad_type=torch.float32)

# bfloat16 parameters whose gradients are accumulated and reduced in float32. DDP of a bfloat16
# model does not do so. The fairest comparison is DDP with main gradients: the same result as ours,
# with DDP's overlap. FSDP2 and autocast keep float32 parameters, as an optimizer would want.
# Ours rounds parameter.grad to bfloat16 once; its shards are not rounded.
MIXED = {
    ALONE: Way(_alone),
    "main gradients, flat all-reduce": Way(MainGradients),
    "DDP with main gradients": Way(MainGradientsDDP),
    "DDP of float32, autocast": Way(AutocastDDP),
    "FSDP2, mixed": Way(partial(fsdp2, mixed=True)),
    OURS: Way(_ours_mixed),
    f"{OURS}, 2**22": Way(partial(_ours_mixed, bucket_size=2**22)),
    f"{OURS}, sharded": Way(_ours_mixed, _gradients_only),
}

TRAINING = {
    ALONE: Way(_alone, _adamw),
    DDP: Way(_ddp, _adamw),
    "FSDP2": Way(fsdp2, _adamw),
    "DDP, ZeroRedundancyOptimizer": Way(_ddp, _zero_adamw),
    "DDP, ZeroRedundancyOptimizer, views": Way(
        partial(_ddp, gradient_as_bucket_view=True),
        partial(_zero_adamw, parameters_as_bucket_view=True),
    ),
    OURS: Way(_ours, _adamw),
    f"{OURS}, sharded": Way(_ours, _sharded_adamw),
    f"{OURS}, sharded, overlap": Way(_ours, partial(_sharded_adamw, overlap=True)),
    f"{OURS}, sharded, stage 2": Way(_ours, partial(_sharded_adamw, stage=2)),
}

# Each way keeps and updates float32 master weights of bfloat16 parameters.
MIXED_TRAINING = {
    ALONE: Way(_alone, _adamw),
    "DDP of float32, autocast": Way(AutocastDDP, _adamw),
    "DDP of float32, autocast, ZeroRedundancyOptimizer": Way(
        AutocastDDP, partial(_zero_adamw, parameters_as_bucket_view=True)
    ),
    "FSDP2, mixed": Way(partial(fsdp2, mixed=True), _adamw),
    f"{OURS}, sharded": Way(_ours_mixed, _sharded_adamw),
    f"{OURS}, sharded, overlap": Way(_ours_mixed, partial(_sharded_adamw, overlap=True)),
    f"{OURS}, sharded, stage 2": Way(_ours_mixed, partial(_sharded_adamw, stage=2)),
}

SMALL = 2**18  # elements, 1 MiB: a small model has few buckets of the usual size
SLOW = {
    ALONE: Way(_alone),
    "flat all-reduce": Way(FlatAllReduce),
    DDP: Way(_ddp),
    "DDP, 1 MB": Way(partial(_ddp, bucket_cap_mb=1)),
    OURS: Way(_ours),
    f"{OURS}, 2**18": Way(partial(_ours, bucket_size=SMALL)),
    f"{OURS}, 2**18, no overlap": Way(partial(_at_the_end, bucket_size=SMALL)),
    f"{OURS}, naive": Way(_naive),
}


def _levels(model: nn.Module, group: ProcessGroup, **options: Any) -> nn.Module:
    """Wrap on a group with hierarchical collectives, first inside the nodes."""
    if not use_hierarchy(group):
        raise SystemExit("the nodes were not found")
    return _ours(model, group, **options)


# A node's ranks share its link. DDP is run with bucket sizes that suit such a model.
NODES = {
    ALONE: Way(_alone),
    **{f"DDP, {size:g} MB": Way(partial(_ddp, bucket_cap_mb=size)) for size in (0.5, 1, 2, 4, 25)},
    OURS: Way(_ours),
    f"{OURS}, levels": Way(_levels),
    f"{OURS}, levels, 2**18": Way(partial(_levels, bucket_size=SMALL)),
}

TABLES = {
    "gradients": GRADIENTS, "mixed": MIXED, "training": TRAINING, "slow": SLOW, "nodes": NODES,
    "mixed training": MIXED_TRAINING,
}  # fmt: skip
