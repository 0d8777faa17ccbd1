"""ZeRO 3: ranks on which `fully_shard` of torch shards a model beside tp and cp."""

from __future__ import annotations

import warnings

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from scaletorch.compose import recompute_layers, token_loss_sum
from scaletorch.parallel.context_parallel import apply_context_parallel
from scaletorch.parallel.pg_manager import ProcessGroupManager
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel

from .cases import Case, model_of
from .peaks import Peak, batch_of, most_taken, on_grid, storage


def gathering(cases: list[Case]) -> list[Peak]:
    """Run cases on this rank among others; return what it holds at its peak in each.

    The CPU's products of bfloat16 take memory for themselves: cases have other dtypes.
    """
    return [on_grid(case, _peak) for case in cases]


def _peak(case: Case, manager: ProcessGroupManager) -> Peak:
    model, optimizer = _prepared(case, manager)
    _backwards(case, model, manager)
    optimizer.step()
    optimizer.zero_grad()
    states = [x for state in optimizer.state.values() for x in state.values()]
    kept = [[*model.parameters()], [p.grad for p in model.parameters()], states]
    held = [storage(map(_own, each)) for each in kept]

    def train() -> None:
        _backwards(case, model, manager)
        optimizer.zero_grad()

    # What gloo's threads still hold of calls before is there at some peaks, and not at others.
    return Peak(held, *min(most_taken(train) for _ in range(3)))


def _prepared(case: Case, manager: ProcessGroupManager):
    """Return the model of a case in shards, and its optimizer."""
    torch.manual_seed(0)
    model = model_of(case)
    if manager.tp_size > 1:
        apply_tensor_parallel(model, group=manager.tp_group)
    apply_context_parallel(model, manager.cp_group, layout="zigzag")
    if case.layout.recompute != "none":
        way = case.layout.recompute == "full" or case.layout.recompute
        recompute_layers(model, recompute=way)
    mesh = DeviceMesh.from_group(manager.cp_dp_group, "cpu")
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model, torch.optim.AdamW(model.parameters())


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _backwards(case: Case, model, manager: ProcessGroupManager) -> None:
    for batch in batch_of(case, manager):
        with warnings.catch_warnings():  # parameters in shards cannot be asked what they mix
            warnings.filterwarnings("ignore", ".*could not be asked", RuntimeWarning)
            losses = model(batch["input_ids"], batch.get("position_ids")), batch["labels"]
        loss = token_loss_sum(*losses)
        del losses  # logits, which a plan does not keep beside what autograd does
        loss.backward()
