"""What an optimizer is to update by: gradients of the whole model, not of a shard or a stage."""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..dist.errors import InvalidArgumentError
from ..parallel.data_parallel import parameter_shards
from ..parallel.expert_parallel.building import find_expert_cuts
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.pg_manager.building import Scope, update_scope
from .forward import terms_of

_models: WeakKeyDictionary[nn.Module, ProcessGroupManager] = WeakKeyDictionary()
_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # and how many parameters it had
_hooks: list[Any] = []


def watch(model: nn.Module, manager: ProcessGroupManager) -> None:
    """Check optimizers of a model's parameters before their first step, where ranks have others.

    Some need what lies on other stages, or in other ranks' experts; others update by gradients that
    were clipped by another norm on each rank.

    Shards of tensor parallelism and of sharded optimizers are checked by these.

    Args:
        model: What `parallelize` returns.
        manager: The grid.
    """
    if manager.tp_size * manager.pp_size * manager.ep_size == 1:
        return
    _models[model] = manager
    terms_of(model).noted = []
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Check an optimizer that is new, or has got further parameters."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _checked.get(optimizer) != count:
        for model, manager in list(_models.items()):
            _check(optimizer, model, manager)
            _look_at_gradients(optimizer, model)
        _checked[optimizer] = count


def _look_at_gradients(optimizer: Optimizer, model: nn.Module) -> None:
    """Warn if all gradients have been changed in place since the step that made them."""
    taken = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    terms = terms_of(model)
    noted, shards = terms.noted, parameter_shards(model)
    if not noted or taken.isdisjoint(id(shard.tensor) for shard in shards):
        return
    terms.noted = None
    if all(gradient._version != version for gradient, version in noted):
        warnings.warn(
            f"{describe_rank()}: all gradients have been changed in place since train_step. Each "
            "rank has its shards or its stage alone, so that torch.nn.utils.clip_grad_norm_ "
            "scales them by another norm on each rank: use scaletorch.compose.clip_grad_norm_("
            "model, max_norm). What treats every element alike on every rank is right",
            stacklevel=4,
        )


def _check(optimizer: Optimizer, model: nn.Module, manager: ProcessGroupManager) -> None:
    """Refuse an optimizer of a model that would need more than it has on this rank.

    Raises:
        InvalidArgumentError: It does.
    """
    taken = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    names = [shard.name for shard in parameter_shards(model) if id(shard.tensor) in taken]
    if not names:
        return
    scope, kind = update_scope(optimizer), type(optimizer).__name__
    if manager.pp_size > 1 and scope > Scope.PARAMETER:
        raise InvalidArgumentError(
            f"{describe_rank()}: {kind} {scope.words}, but the stages of a pipeline have other "
            "parameters: take an optimizer that updates each parameter by itself, or no pipeline"
        )
    cuts = find_expert_cuts(model)
    stacks = [name for name in names if name in cuts]
    if manager.ep_size > 1 and stacks and scope is not Scope.ELEMENT:
        raise InvalidArgumentError(
            f"{describe_rank()}: {kind} {scope.words}, but each rank has some of the experts that "
            f"{stacks[0]} stacks: give experts an optimizer that treats every element alike, such "
            "as AdamW, or do without expert parallelism"
        )
