"""Ranks that train a case: what autograd keeps, and what they hold at their peak."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import profile
from training import grid

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.models.mixture import Router
from scaletorch.parallel.data_parallel import parameter_shards, shard_optimizer
from scaletorch.parallel.data_parallel.buckets.bucket import Bucket
from scaletorch.parallel.data_parallel.buckets.manager import BucketManager
from scaletorch.parallel.data_parallel.building import ShardedGradient
from scaletorch.parallel.pg_manager import ProcessGroupManager

from .cases import Case, model_of


def storage(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the memory under some tensors."""
    memory = [t.untyped_storage() for t in tensors if t is not None]
    return sum({each.data_ptr(): each.nbytes() for each in memory}.values())


def on_grid(case: Case, run):
    """Return `run(case, manager)` on the grid of a case."""
    layout = case.layout
    sizes = {f"{axis}_size": getattr(layout.grid, axis) for axis in ("tp", "cp", "pp", "dp", "ep")}
    with grid(sizes) as manager:
        return run(case, manager)


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


def kept_bytes(model: nn.Module, train: Callable[[], object]) -> int:
    """Return the bytes that autograd keeps of a step; each storage counts once, parameters do not.

    One backward follows all forwards, without recomputation.
    """
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        train()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(size for place, size in found.items() if place not in parameters)


class Peak(NamedTuple):
    """Bytes of a rank in a step."""

    held: list[int]  # of parameters, gradients and the optimizer's state, before it
    taken: int  # the most that the allocator gave in addition
    rest: int  # what it did not get back: gloo's threads hold tensors until their next call


def peaks(cases: list[Case]) -> list[Peak]:
    """Run cases on this rank among others; return what it holds at its peak in each."""
    return [on_grid(case, _peak) for case in cases]


def _peak(case: Case, manager: ProcessGroupManager) -> Peak:
    model, optimizer = prepared(case, manager)
    batch = batch_of(case, manager)
    for _ in range(2):  # the second fills the buckets that the first one has found
        train_step(model, batch, manager)
        optimizer.step()
        optimizer.zero_grad()
    for buckets in model.bucket_managers:
        _take_turns(buckets)
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(_share_out)
    state = held(model, optimizer)

    def train() -> None:
        train_step(model, batch, manager)
        optimizer.zero_grad()

    return Peak(state, *most_taken(train))


def most_taken(train: Callable[[], None]) -> tuple[int, int]:
    """Return the most that the allocator gives meanwhile, and what it does not get back."""
    gc.collect()  # what models before it left behind would count as given back in this step
    with profile(profile_memory=True) as profiled:
        train()
    events = profiled.profiler.kineto_results.events()
    taken = [*accumulate(event.nbytes() for event in events if event.name() == "[memory]")]
    return max(taken), max(taken[-1], 0)


def _share_out(router: Router, _: object, output: tuple[Tensor, Tensor]) -> None:
    """Have tokens go to experts in turn, evenly as a plan takes them to be shared out."""
    index_TK = output[0].data  # autograd, which keeps it, need not know
    turns = torch.arange(index_TK.numel()).remainder_(len(router.weight))
    index_TK.copy_(turns.view_as(index_TK))


def _take_turns(buckets: BucketManager) -> None:
    """Wait for each bucket when the next one leaves, as a plan has it."""
    launch = buckets._launch

    def launched(bucket: Bucket) -> None:
        before, buckets._in_flight = buckets._in_flight, Later()
        launch(bucket)
        for each in before:
            each.wait()
            each.collect_if_done()

    buckets._in_flight, buckets._launch = Later(), launched


class Later(list):
    """Buckets in flight that are looked at when the next one leaves."""

    def __bool__(self) -> bool:
        return False
