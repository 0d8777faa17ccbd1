"""Whole tensors of the plain model, gathered from any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from ..dist import all_gather_object
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
    stage = gather_experts(model, gather_tensors(model, tensors, manager.tp_group))
    stages = all_gather_object({name: t.cpu() for name, t in stage.items()}, manager.pp_group)
    return {name: tensor for each in stages for name, tensor in each.items()}


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


def local_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of this rank's parameters under all their names.

    Those that lie in shards are gathered: all ranks of the data-parallel group call it.
    """
    found = whole_gradients(model)
    of = {parameter: found.get(name) for name, parameter in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: g for name, p in named if (g := of[p]) is not None}


def full_gradients(
    model: nn.Module, manager: ProcessGroupManager | None = None
) -> dict[str, Tensor]:
    """Return every parameter's whole gradient (CPU tensors), by plain names, on every rank.

    Args:
        model: What `parallelize` returned.
        manager: The grid; by default the model's.
    """
    return gather_full(model, local_gradients(model), manager)
