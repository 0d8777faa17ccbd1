"""Whole tensors of the plain model, gathered from any layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from ..dist import all_gather_object, broadcast, get_comm_device, group_ranks
from ..parallel.data_parallel import whole_gradients
from ..parallel.expert_parallel.building import gather_experts
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.tensor_parallel import gather_tensors
from .forward import manager_of


def gather_full(
    model: nn.Module, tensors: Mapping[str, Tensor], manager: ProcessGroupManager | None = None
) -> dict[str, Tensor]:
    """Return whole tensors of all stages from this rank's shards, by plain names, on every rank."""
    manager = manager_of(model, manager)
    stage = gather_stage(model, tensors, manager)
    stages = all_gather_object({name: t.cpu() for name, t in stage.items()}, manager.pp_group)
    return {name: tensor for each in stages for name, tensor in each.items()}


def gather_stage(
    model: nn.Module, tensors: Mapping[str, Tensor], manager: ProcessGroupManager
) -> dict[str, Tensor]:
    """Return whole tensors of this stage from shards, on their device."""
    return gather_experts(model, gather_tensors(model, tensors, manager.tp_group))


def of_all_stages(tensors: Mapping[str, Tensor], manager: ProcessGroupManager) -> dict[str, Tensor]:
    """Return tensors of all stages on every rank of a pipeline, on their device.

    Args:
        tensors: This stage's; what several have is taken from the first of them.
        manager: The grid.
    """
    if manager.pp_size == 1:
        return {**tensors}
    heads = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    found: dict[str, Tensor] = {}
    device = get_comm_device(manager.pp_group)
    ranks = group_ranks(manager.pp_group)
    for rank, theirs in enumerate(all_gather_object(heads, manager.pp_group)):
        shapes: dict[torch.dtype, dict[str, torch.Size]] = {}
        for name, (shape, dtype) in theirs.items():
            if name not in found:
                shapes.setdefault(dtype, {})[name] = shape
        for dtype, of in shapes.items():  # all of a dtype in one message
            sizes = [shape.numel() for shape in of.values()]
            flat = torch.empty(sum(sizes), dtype=dtype, device=device)
            parts = flat.split(sizes)
            if rank == manager.pp_rank:
                for name, part in zip(of, parts, strict=True):
                    part.view(of[name]).copy_(tensors[name])
            broadcast(flat, ranks[rank], manager.pp_group)
            found |= {n: part.view(of[n]) for n, part in zip(of, parts, strict=True)}
    return found


def full_state_dict(
    model: nn.Module,
    manager: ProcessGroupManager | None = None,
    *,
    only: Callable[[str], bool] | None = None,
) -> dict[str, Tensor]:
    """Return the plain one-process `state_dict` (CPU tensors) on every rank, which all call it.

    Args:
        model: What `parallelize` returned.
        manager: The grid; by default the model's.
        only: Whether the tensor of a name is wanted, such as an adapter's; None takes all.
    """
    state = model.state_dict().items()
    wanted = {k: v.detach() for k, v in state if only is None or only(k)}
    return gather_full(model, wanted, manager)


def local_gradients(model: nn.Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return the gradients of this rank's parameters under all their names.

    Those that lie in shards are gathered: all ranks of the data-parallel group call it.

    Args:
        model: What `parallelize` returned.
        names: Of the parameters that are wanted; None takes all.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    wanted = {name: p for name, p in named.items() if names is None or name in names}
    parameters = {id(parameter) for parameter in wanted.values()}
    first = {id(p): name for name, p in model.named_parameters() if id(p) in parameters}
    found = whole_gradients(model, {*first.values()})
    return {name: found[first[id(p)]] for name, p in wanted.items() if first[id(p)] in found}


def full_gradients(
    model: nn.Module, manager: ProcessGroupManager | None = None
) -> dict[str, Tensor]:
    """Return every parameter's whole gradient (CPU tensors), by plain names, on every rank.

    Args:
        model: What `parallelize` returned.
        manager: The grid; by default the model's.
    """
    return gather_full(model, local_gradients(model), manager)
