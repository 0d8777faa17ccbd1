"""Checks of what an optimizer updates by: gradients of the whole model, not of a shard or a stage.

An optimizer that needs more than a rank has is refused before its first step. In every step, ranks
compare the factor by which gradients were scaled since `train_step`: a loop that clips them by the
norm of those that a rank happens to have scales each rank's by another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..dist import all_gather_object
from ..dist.errors import InvalidArgumentError, MismatchError
from ..parallel.data_parallel import parameter_shards
from ..parallel.data_parallel.building import is_sharded
from ..parallel.expert_parallel.building import find_expert_cuts
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.pg_manager.building import Scope, update_scope

SAMPLED = 8  # gradients of a rank, spread over its model
ELEMENTS = 256  # of each of them
APART = 1e-6  # relative: factors that differ by less, or by an eighth of the dtype's, are the same
CLIPPED = (
    "gradients were scaled by different factors on different ranks between train_step and the "
    "optimizer's step: {}. Likely each rank clipped by the norm of its own shards, stage or "
    "experts, as torch.nn.utils.clip_grad_norm_ does: use scaletorch.compose.clip_grad_norm_("
    "model, max_norm), and go on from a checkpoint from before. To train some layers faster than "
    "others, set the lr of the optimizer's groups"
)


class Scaling:
    """A sample of gradients at the end of each step, and by what they are scaled afterwards.

    Args:
        manager: The grid.
    """

    def __init__(self, manager: ProcessGroupManager) -> None:
        self.manager = manager
        self._divided = manager.tp_size * manager.pp_size * manager.ep_size > 1
        self._tensors: list[Tensor] = []  # parameters, or shards of a sharded optimizer
        self._before: dict[int, Tensor] = {}  # elements of their gradients, by id
        self._factors: list[Tensor] = []  # of each optimizer that has stepped since; 0-d
        self._rounding = 0.0

    def sample(self, model: nn.Module) -> None:
        """Sample gradients at the end of a step, where ranks have different ones."""
        self._before, self._factors = {}, []
        if not (self._divided or is_sharded(model)):
            return
        if not self._tensors or not all(_is_plain(each.grad) for each in self._tensors):
            found = [s.tensor for s in parameter_shards(model) if _is_plain(s.tensor.grad)]
            found = [each for each in found if each.device == found[0].device]
            self._tensors = found[:: -(-len(found) // SAMPLED) or 1]
            self._rounding = max((torch.finfo(each.dtype).eps for each in found), default=0.0)
        self._before = {id(each): _elements(each).clone() for each in self._tensors}

    def compare(self, taken: set[int]) -> None:
        """Find the factor by which the gradients that an optimizer takes were scaled.

        Nothing is read back: the factor stays on its device until the next step.

        Args:
            taken: Ids of the optimizer's parameters.
        """
        mine = [each for each in self._tensors if id(each) in taken and id(each) in self._before]
        if mine and all(_is_plain(each.grad) for each in mine):
            then = torch.cat([self._before.pop(id(each)) for each in mine])
            now = torch.cat([_elements(each) for each in mine])
            self._factors.append(_factor(then, now, self._rounding))

    def told(self) -> list[float]:
        """Return this rank's share of the step's message: count, factor, its square, tolerance."""
        factor = self._own()
        if factor is None:
            return [0, 0, 0, 0]
        return [1, factor, factor**2, max(APART, self._rounding / 8)]

    def refuse_different(self, message: Sequence[float]) -> None:
        """Refuse factors that differ between ranks; all ranks call it.

        Args:
            message: The sum of what all ranks have told.

        Raises:
            MismatchError: They differ; on every rank.
        """
        count, total, squares, tolerance = message
        if count < 2:
            return
        mean = total / count
        if (squares / count - mean**2) <= (tolerance / count * mean) ** 2:
            return
        own = (self._own(), describe_rank())
        known = [each for each in all_gather_object(own, self.manager.world_group) if each[0]]
        least, most = min(known), max(known)
        texts = [f"by {factor:.6g} on {rank}" for factor, rank in (least, most)]
        self._factors = []
        raise MismatchError(f"{describe_rank()}: {CLIPPED.format(', '.join(texts))}")

    def _own(self) -> float | None:
        """Return the factor of this rank, read after the loss; None if there was not one."""
        factors = [each for each in map(float, self._factors) if each == each]
        return sum(factors) / len(factors) if factors else None


_models: WeakKeyDictionary[nn.Module, Scaling] = WeakKeyDictionary()
_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # and how many parameters it had
_hooks: list[Any] = []


def watch(model: nn.Module, manager: ProcessGroupManager) -> None:
    """Check optimizers of a model's parameters before their steps, where ranks have others.

    Shards of tensor parallelism and of sharded optimizers are checked by these.

    Args:
        model: What `parallelize` returns.
        manager: The grid.
    """
    if manager.world_size == 1:
        return
    _models[model] = Scaling(manager)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def unwatch(model: nn.Module) -> None:
    """Check optimizers of a model no longer."""
    _models.pop(model, None)


def scaling_of(model: nn.Module) -> Scaling | None:
    """Return what is known of the scaling of a model's gradients; None on one rank."""
    return _models.get(model)


def sample_gradients(model: nn.Module) -> None:
    """Sample a model's gradients at the end of a step."""
    scaling = _models.get(model)
    if scaling is not None:
        scaling.sample(model)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Check an optimizer that is new, or has got further parameters; look at its gradients."""
    taken = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    for model, scaling in list(_models.items()):
        if _checked.get(optimizer) != len(taken):
            _check(optimizer, taken, model, scaling.manager)
        scaling.compare(taken)
    _checked[optimizer] = len(taken)


def _is_plain(gradient: Tensor | None) -> bool:
    """Return whether a gradient is an ordinary tensor with elements."""
    return type(gradient) is Tensor and gradient.layout is torch.strided and gradient.numel() > 0


def _elements(tensor: Tensor) -> Tensor:
    """Return the first elements of a tensor's gradient, in one dim."""
    assert tensor.grad is not None
    flat = tensor.grad.detach().flatten()[:ELEMENTS]
    return torch.view_as_real(flat).flatten() if flat.is_complex() else flat


def _factor(then: Tensor, now: Tensor, rounding: float) -> Tensor:
    """Return the one factor between two tensors; NaN if there is none. 0-d."""
    exact = torch.float32 if then.device.type == "mps" else torch.float64
    then, now = then.to(exact), now.to(exact)
    factor = (then @ now) / (then @ then)
    apart = (now - factor * then).square().sum()
    return factor.where(apart <= (4 * rounding) ** 2 * now.square().sum(), torch.nan)


def _check(
    optimizer: Optimizer, taken: set[int], model: nn.Module, manager: ProcessGroupManager
) -> None:
    """Refuse an optimizer of a model that would need more than it has on this rank.

    Raises:
        InvalidArgumentError: It does.
    """
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
