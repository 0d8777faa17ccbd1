"""Whole tensors of the plain model, gathered from any layout."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..dist import all_gather_object
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.tensor_parallel import gather_tensors


def gather_full(
    model: nn.Module, tensors: Mapping[str, Tensor], manager: ProcessGroupManager
) -> dict[str, Tensor]:
    """Return whole tensors of all stages from this rank's shards, by plain names, on every rank."""
    stage = gather_tensors(model, tensors, manager.tp_group)
    stages = all_gather_object({name: t.cpu() for name, t in stage.items()}, manager.pp_group)
    return {name: tensor for part in stages for name, tensor in part.items()}


def full_state_dict(model: nn.Module, manager: ProcessGroupManager) -> dict[str, Tensor]:
    """Return the plain one-process ``state_dict`` (CPU tensors) on every rank."""
    return gather_full(model, {k: v.detach() for k, v in model.state_dict().items()}, manager)


def full_gradients(model: nn.Module, manager: ProcessGroupManager) -> dict[str, Tensor]:
    """Return every parameter's whole gradient (CPU tensors), by plain names, on every rank."""
    named = model.named_parameters(remove_duplicate=False)
    return gather_full(model, {n: p.grad for n, p in named if p.grad is not None}, manager)
