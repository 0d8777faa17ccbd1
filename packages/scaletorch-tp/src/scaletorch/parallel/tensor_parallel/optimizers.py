"""Refuse optimizers that are not element-wise: on a shard their update would be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank
from ..pg_manager.building import Scope, update_scope

_models: WeakSet[nn.Module] = WeakSet()  # models with sharded layers, or the layers
_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # optimizer -> parameter count
_hooks: list[Any] = []


def watch(module: nn.Module) -> None:
    """Check every optimizer of this module's parameters before its first step."""
    _models.add(module)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Check an optimizer that is new or has a new number of parameters."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _checked.get(optimizer) != count:
        _check(optimizer)
        _checked[optimizer] = count


def _check(optimizer: Optimizer) -> None:
    """Refuse an optimizer with sharded parameters whose update is not element-wise."""
    # Longest names last, so that a model's names win over those of a layer alone.
    longest = sorted(_parameters(), key=lambda entry: len(entry[0]))
    known = {id(p): (name, shard) for name, p, shard in longest}
    for tensor in (entry for group in optimizer.param_groups for entry in group["params"]):
        # A sharded optimizer holds stand-ins of parameters. Each rank has other stand-ins of
        # shards, so any stand-in counts: all ranks then give the same answer.
        origin = getattr(tensor, "stands_for", tensor)
        name, shard = known.get(id(origin), ("", False))
        if shard or (name and origin is not tensor):
            break
    else:
        return
    scope = update_scope(optimizer)
    if scope is not Scope.ELEMENT:
        raise InvalidArgumentError(
            f"{describe_rank()}: {type(optimizer).__name__} {scope.words}, but {name} "
            f"{tuple(tensor.shape)} is of a model whose parameters are divided over the "
            "tensor-parallel ranks: the update of a shard would differ from that of the "
            "full parameter. Give it whole matrices by whole_matrices(optimizer, model) of "
            "scaletorch.compose, take an optimizer that treats every element alike, such as "
            "AdamW, or do without tensor parallelism"
        )


def _parameters() -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Yield the name of each watched parameter, the parameter, and whether it is a shard."""
    for model in _models:
        for name, module in model.named_modules():
            dims = getattr(module, "shard_dims", {})
            for parameter_name, parameter in module._parameters.items():
                if parameter is not None:
                    yield f"{name}.{parameter_name}".lstrip("."), parameter, parameter_name in dims
