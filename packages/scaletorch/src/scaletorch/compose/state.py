"""Gather whole tensors of the plain model from any layout; load and save whole state dicts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..dist import all_gather_object, broadcast, get_comm_device, group_ranks
from ..dist.errors import StateError
from ..parallel.data_parallel import whole_gradients
from ..parallel.expert_parallel.building import gather_experts
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.tensor_parallel import gather_tensors
from ..parallel.tensor_parallel.building import find_cuts
from .forward import manager_of


def gather_full(
    model: nn.Module, tensors: Mapping[str, Tensor], manager: ProcessGroupManager | None = None
) -> dict[str, Tensor]:
    """Gather whole tensors of all stages from shards; CPU tensors by plain name, on every rank."""
    manager = manager_of(model, manager)
    stage = gather_stage(model, tensors, manager)
    stages = all_gather_object({name: t.cpu() for name, t in stage.items()}, manager.pp_group)
    return {name: tensor for each in stages for name, tensor in each.items()}


def gather_stage(
    model: nn.Module, tensors: Mapping[str, Tensor], manager: ProcessGroupManager
) -> dict[str, Tensor]:
    """Gather whole tensors of this stage from shards, on their device."""
    return gather_experts(model, gather_tensors(model, tensors, manager.tp_group))


def of_all_stages(tensors: Mapping[str, Tensor], manager: ProcessGroupManager) -> dict[str, Tensor]:
    """Return all stages' tensors, on the communication device; the first stage has precedence."""
    if manager.pp_size == 1:
        return {**tensors}
    heads = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    found: dict[str, Tensor] = {}
    device = get_comm_device(manager.pp_group)
    ranks = group_ranks(manager.pp_group)
    for rank, theirs in enumerate(all_gather_object(heads, manager.pp_group)):
        for name, (shape, dtype) in theirs.items():
            if name in found:
                continue
            found[name] = torch.empty(shape, dtype=dtype, device=device)
            if rank == manager.pp_rank:
                found[name].copy_(tensors[name])
            broadcast(found[name], ranks[rank], manager.pp_group)
    return found


def full_state_dict(
    model: nn.Module,
    manager: ProcessGroupManager | None = None,
    *,
    only: Callable[[str], bool] | None = None,
) -> dict[str, Tensor]:
    """Return the plain model's `state_dict` (CPU tensors) on every rank; all ranks call it.

    Args:
        model: The model that `parallelize` returned.
        manager: The grid; by default the model's.
        only: Returns True for the names to gather, such as an adapter's; None gathers all.
    """
    state = model.state_dict().items()
    wanted = {k: v.detach() for k, v in state if only is None or only(k)}
    return gather_full(model, wanted, manager)


def local_gradients(model: nn.Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return the gradients of this rank's parameters under all their names.

    Gradients sharded over the data-parallel group are gathered, so all its ranks call it.

    Args:
        model: The model that `parallelize` returned.
        names: The parameters to return; None returns all.
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
    """Return every parameter's whole gradient (CPU tensors), by plain name; all ranks call it.

    `model` and `manager` are as for `full_state_dict`.
    """
    return gather_full(model, local_gradients(model), manager)


Shapes = dict[str, torch.Size]


def whole_shapes(model: nn.Module) -> Shapes:
    """Return the shapes of a plain model's parameters under all their names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.shape for name, p in named if not is_lazy(p)}


def keep_whole_state(model: nn.Module, shapes: Shapes, manager: ProcessGroupManager) -> None:
    """Let a sharded model load whole state dicts, and refuse to save shards as whole; in place."""
    if manager.tp_size * manager.pp_size * manager.ep_size == 1:
        return
    model.register_load_state_dict_pre_hook(partial(_take_own, shapes))
    for name, module in model.named_modules():
        if hasattr(type(module), "save_pretrained"):
            within = f"{name}." if name else ""
            own = {n.removeprefix(within): s for n, s in shapes.items() if n.startswith(within)}
            vars(module)["save_pretrained"] = partial(_save, type(module), module, own)


def _take_own(
    shapes: Shapes, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Reduce a whole state to this rank's shards before torch loads it; leave a state of shards."""
    own, cuts = module.state_dict(keep_vars=True), find_cuts(module)
    for name in [name for name in shapes if isinstance(state.get(prefix + name), Tensor)]:
        given, cut = state[prefix + name], cuts.get(name)
        if name not in own:  # another stage's
            del state[prefix + name]
        elif cut is not None and given.shape == shapes[name] != own[name].shape:
            state[prefix + name] = cut.take(given)


def _save(kind: type[Any], module: nn.Module, shapes: Shapes, *args: Any, **kwargs: Any) -> Any:
    """Call `save_pretrained` with a whole `state_dict`; refuse to save this rank's shards."""
    given = kwargs.get("state_dict")
    if isinstance(given, Mapping) and all(
        name in given and given[name].shape == shape for name, shape in shapes.items()
    ):
        return kind.save_pretrained(module, *args, **kwargs)
    raise StateError(
        f"{describe_rank()}: {kind.__name__}.save_pretrained would write this rank's shards as the "
        "whole model: call scaletorch.checkpoint.export_safetensors(model, folder), or "
        "export_adapter, on all ranks; or pass state_dict=full_state_dict(model), made on all ranks"
    )
