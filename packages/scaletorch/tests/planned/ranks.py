"""What ranks really hold and send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.parallel.data_parallel import parameter_shards, shard_optimizer
from scaletorch.parallel.data_parallel.sharding.gradient import ShardedGradient
from scaletorch.parallel.pg_manager import (
    ProcessGroupManager,
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.plan.applying import arguments
from scaletorch.plan.stages import schedule_of

from .drawing import Case
from .models import model_of

AXES = ("tp", "cp", "ep", "pp", "cp_dp", "edp", "world")
NAMES = {"allreduce": "all_reduce", "_allgather_base": "all_gather", "allgather": "all_gather",
         "alltoall_base": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
         "reduce_scatter": "reduce_scatter", "send": "send"}  # fmt: skip
SUMMED = {None: None, 4: torch.float32, 8: torch.float64}
Sends = Counter[tuple[str, str]]


class Ledger(TorchDispatchMode):
    """Counts collectives and the bytes that this rank sends in them, as rings send them.

    Axes that have the same ranks count as the first of them.
    """

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__()
        self.axes, self.counts, self.bytes = axes, Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").rstrip("_")
            if not name.startswith(("recv", "barrier")):
                self._add(NAMES[name], args, result)
        return result

    def _add(self, operation, args, result):
        group = next(filter(None, map(group_of, tree_leaves(args))))
        own = self.axes[group.group_name], operation
        size, whole = group.size(), max(nbytes(value) for value in (*args, result))
        ways = {"all_reduce": 2 * (size - 1), "send": size}.get(operation, size - 1)
        self.counts[own] += 1
        self.bytes[own] += ways * whole // size


def nbytes(value: object) -> int:
    return sum(x.nbytes for x in tree_leaves(value) if isinstance(x, Tensor))


def group_of(value: object) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(value)
    except (RuntimeError, TypeError):  # another argument
        return None


def storage(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the memory under some tensors."""
    memory = [t.untyped_storage() for t in tensors if t is not None]
    return sum({each.data_ptr(): each.nbytes() for each in memory}.values())


def measured(cases: list[Case]) -> list[tuple[list[int], Sends, Sends]]:
    """Run cases on this rank among others; return what is held, counts and bytes of each."""
    return [_measured(case) for case in cases]


def _measured(case: Case) -> tuple[list[int], Sends, Sends]:
    return on_grid(case, _trained)


def on_grid(case: Case, run):
    """Return `run(case, manager)` on the grid of a case."""
    layout = case.layout
    sizes = {f"{axis}_size": getattr(layout.grid, axis) for axis in ("tp", "cp", "pp", "dp", "ep")}
    manager = setup_process_group_manager(**sizes)
    try:
        return run(case, manager)
    finally:
        destroy_process_group_manager()


def _trained(case: Case, manager: ProcessGroupManager) -> tuple[list[int], Sends, Sends]:
    model, optimizer = prepared(case, manager)
    step(case, model, optimizer, manager)  # learns the order of buckets, the forms of messages
    with Ledger(axes_of(manager)) as ledger:
        step(case, model, optimizer, manager)
    return held(model, optimizer), ledger.counts, ledger.bytes


def prepared(case: Case, manager: ProcessGroupManager):
    """Return the model of a case on the grid, and its optimizer."""
    layout = case.layout
    torch.manual_seed(0)
    model = parallelize(
        model_of(case),
        manager,
        schedule=schedule_of(layout) if layout.chunks > 1 else layout.schedule,
        recompute=arguments(layout)["recompute"],
        sequence_parallel=layout.sequence_parallel,
        data_parallel={
            "grad_type": {None: None, 4: torch.float32, 8: torch.float64}[case.sum_item]
        },
        rehearse=False,
    )
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


def axes_of(manager: ProcessGroupManager) -> dict[str, str]:
    found: dict[str, str] = {}
    first: dict[tuple[int, ...], str] = {}
    for axis in AXES:
        group = manager.world_group if axis == "world" else manager.group(axis)
        if group is not None:
            members = tuple(dist.get_process_group_ranks(group))
            found[group.group_name] = first.setdefault(members, axis)
    return found
