"""Check optimizers: refuse those that need more than a rank's shards; compare changes by the loop.

An optimizer that needs more than a rank has is refused before its first step. Changes that the
training loop makes to gradients before, and to weights after an optimizer's step, are sampled here
and compared over ranks in the next `train_step`.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..dist.errors import InvalidArgumentError
from ..parallel.data_parallel import parameter_shards
from ..parallel.expert_parallel.building import find_expert_cuts
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.pg_manager.building import Scope, update_scope
from .forward import terms_of
from .scaling import Scaling, scalings

_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # -> its number of parameters
_hooks: list[Any] = []


def watch(model: nn.Module, manager: ProcessGroupManager) -> None:
    """Check optimizers of a model's parameters at their steps, if there are several ranks.

    Tensor parallelism and sharded optimizers check their own shards.
    """
    if manager.world_size == 1:
        return
    scalings[model] = Scaling(manager)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Check an optimizer that is new or has more parameters; sample its gradients and rates."""
    taken = _taken(optimizer)
    for model, scaling in list(scalings.items()):
        if _checked.get(optimizer) != len(taken):
            _require_own_parameters(optimizer, taken, model)
            _check(optimizer, taken, model, scaling.manager)
        scaling.before_update(taken)
        scaling.note_rates(optimizer)
    _checked[optimizer] = len(taken)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    """Sample the weights after an optimizer's step."""
    for scaling in list(scalings.values()):
        scaling.after_update(_taken(optimizer))


def _taken(optimizer: Optimizer) -> dict[int, Tensor]:
    return {id(tensor): tensor for group in optimizer.param_groups for tensor in group["params"]}


def _require_own_parameters(optimizer: Optimizer, taken: Container[int], model: nn.Module) -> None:
    """Refuse an optimizer made before `parallelize`, whose parameters are no longer the model's."""
    now = dict(model.named_parameters(remove_duplicate=False))
    before = {name: each() for name, each in terms_of(model).originals.items() if name in now}
    left = [name for name, p in before.items() if p is not now[name] and id(p) in taken]
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise InvalidArgumentError(
            f"{describe_rank()}: {type(optimizer).__name__} has {', '.join(left[:3])}{more} of the "
            "plain model, in whose place the model has this rank's shards since parallelize, so "
            "these would not be trained: make the optimizer of model.parameters() after "
            "parallelize"
        )


def _check(
    optimizer: Optimizer, taken: Container[int], model: nn.Module, manager: ProcessGroupManager
) -> None:
    """Refuse an optimizer that needs parameters or experts that this rank does not have."""
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
