"""The plain model's own ways to load and save, where this rank has a stage or shards of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..dist.errors import StateError
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.tensor_parallel.building import find_cuts

Shapes = dict[str, torch.Size]


def keep_whole_state(model: nn.Module, outline: nn.Module, manager: ProcessGroupManager) -> None:
    """Let a divided model load whole state dicts, and not save its shards for the whole; in place.

    Args:
        model: The module within the wrappers.
        outline: Of the plain model.
        manager: The grid.
    """
    if manager.tp_size * manager.pp_size * manager.ep_size == 1:
        return
    shapes = {n: p.shape for n, p in outline.named_parameters(remove_duplicate=False)}
    model.register_load_state_dict_pre_hook(partial(_take_own, shapes))
    for name, module in model.named_modules():
        if hasattr(type(module), "save_pretrained"):
            within = f"{name}." if name else ""
            own = {n.removeprefix(within): s for n, s in shapes.items() if n.startswith(within)}
            vars(module)["save_pretrained"] = partial(_save, type(module), module, own)


def _take_own(
    shapes: Shapes, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Leave of a whole model's state what this rank has; other states stay as they are.

    Args:
        shapes: Of the plain model's parameters.
        module: The module that loads, as torch calls such a hook.
        state: Is torch's own copy, and changed.
        prefix: Of the module's names in it.
    """
    own, cuts = module.state_dict(keep_vars=True), find_cuts(module)
    for name in [name for name in shapes if isinstance(state.get(prefix + name), Tensor)]:
        given, cut = state[prefix + name], cuts.get(name)
        if name not in own:  # another stage's
            del state[prefix + name]
        elif cut is not None and given.shape == shapes[name] != own[name].shape:
            state[prefix + name] = cut.take(given)


def _save(kind: type[Any], module: nn.Module, shapes: Shapes, *args: Any, **kwargs: Any) -> Any:
    """Save a whole state that is given; refuse to take this rank's for it.

    Raises:
        StateError: There is no such state among the arguments.
    """
    given = kwargs.get("state_dict")
    if isinstance(given, Mapping) and all(
        name in given and given[name].shape == shape for name, shape in shapes.items()
    ):
        return kind.save_pretrained(module, *args, **kwargs)
    raise StateError(
        f"{describe_rank()}: {kind.__name__}.save_pretrained would write this rank's shards or "
        "stage for the whole model: call scaletorch.checkpoint.export_safetensors(model, folder) "
        "on all ranks, and model.config.save_pretrained(folder) on one; or export_adapter for an "
        "adapter; or pass state_dict=scaletorch.compose.full_state_dict(model), made on all ranks"
    )
