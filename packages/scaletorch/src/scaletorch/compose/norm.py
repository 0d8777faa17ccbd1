"""The true global gradient norm: every element of the plain model counted once over the grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..dist import all_reduce
from ..parallel.data_parallel import Shard
from ..parallel.data_parallel.gradients.nonfinite import found_on_ranks, refuse_nonfinite
from ..parallel.data_parallel.gradients.norm import (
    check_max_norm,
    checked_order,
    device_of,
    power_sum,
    root,
    scale_gradients,
)
from ..parallel.data_parallel.shards import is_sharded, settled_shards
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.tensor_parallel import split_by_owner

# What this rank counts of a shard: all of it, nothing, or the elements where a mask is True.
Counted = bool | Tensor
_counted: WeakKeyDictionary[nn.Module, tuple[object, list[Counted]]] = WeakKeyDictionary()


def global_grad_norm(
    model: nn.Module, manager: ProcessGroupManager, *, norm_type: float = 2.0
) -> Tensor:
    """Return the norm of the plain model's whole gradient, each element counted once.

    Costs an all-reduce of one number over tp and pp, and over cp x dp where these have shards.

    Args:
        model: What ``parallelize`` returned; its gradients are already summed over cp x dp, as
            after ``train_step``. A gradient that is None counts nothing.
        manager: The grid.
        norm_type: Order of the norm, above 0; ``float("inf")`` is the largest element.

    Returns:
        0-d, in the parameters' dtype and float32 at least, the same bits on every rank.

    Raises:
        InvalidArgumentError: ``norm_type`` is not a number above 0.
    """
    order = checked_order(norm_type)
    device = device_of(model, manager.world_group)
    total = power_sum(counted_gradients(model, manager), order, device)
    sharding = [manager.cp_dp_group] if is_sharded(model) else []
    for group in (*sharding, manager.tp_group, manager.pp_group):
        if order == math.inf:
            all_reduce(total, "max", group=group)
        else:
            all_reduce(total, group=group)
    return root(total, order, model)


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    manager: ProcessGroupManager,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``; return the norm before.

    Args:
        model: As in `global_grad_norm`.
        max_norm: At least 0.
        manager: The grid.
        norm_type: As in `global_grad_norm`.
        error_if_nonfinite: Raise where the norm is no finite number. Otherwise gradients become
            NaN or 0 then, as with torch's function of this name.

    Raises:
        InvalidArgumentError: ``max_norm`` or ``norm_type`` is no such number.
        NonFiniteError: On every rank, with the parameters and their ranks.
    """
    check_max_norm(max_norm)
    norm = global_grad_norm(model, manager, norm_type=norm_type)
    if error_if_nonfinite and not norm.isfinite():
        refuse_nonfinite(norm, nonfinite_gradients(model, manager))
    scale_gradients(settled_shards(model), max_norm, norm)
    return norm


def nonfinite_gradients(model: nn.Module, manager: ProcessGroupManager) -> list[tuple[str, str]]:
    """Return which gradients are infinite or NaN, and where; every rank calls it.

    Returns:
        The parameter's name and a rank's coordinates, ``("norm.weight", "dp0 pp1 cp0 tp1")``, for
        every rank that has such an element; by rank, the same list on all of them.
    """
    place = str(manager.grid.coordinates(manager.global_rank))
    return found_on_ranks(model, manager.world_group, place)


def counted_gradients(model: nn.Module, manager: ProcessGroupManager) -> Iterator[Tensor]:
    """Yield the gradients that this rank adds to the norm.

    What is replicated over tp counts on its first rank, a parameter tied across stages on its
    first; and beside shards over cp x dp, what is replicated there on the first rank.
    """
    shards = settled_shards(model)
    first = manager.cp_dp_rank == 0 or not is_sharded(model)
    for shard, counted in zip(shards, _counted_of(model, shards, manager), strict=True):
        gradient = shard.tensor.grad
        if gradient is None or counted is False or (shard.replicated and not first):
            continue
        if isinstance(counted, Tensor):
            gradient = gradient.flatten().where(counted, gradient.new_zeros(()))
        yield gradient


def _counted_of(
    model: nn.Module, shards: Sequence[Shard], manager: ProcessGroupManager
) -> list[Counted]:
    """Return what this rank counts of each shard, computed anew only when the shards change."""
    ranges = [(s.name, s.parameter.shape, s.parameter.device, s.start, s.stop) for s in shards]
    key = (ranges, manager.tp_rank, manager.pp_rank)
    known = _counted.get(model)
    if known is None or known[0] != key:
        tied: dict[str, tuple[int, ...]] = getattr(model, "tied_parameters", {})  # of a stage
        here = [tied.get(s.name, (manager.pp_rank,))[0] == manager.pp_rank for s in shards]
        owned = _owned(model, [s for s, own in zip(shards, here, strict=True) if own], manager)
        known = key, [own and _part(owned[s.name], s) for s, own in zip(shards, here, strict=True)]
        _counted[model] = known
    return known[1]


def _owned(
    model: nn.Module, shards: Sequence[Shard], manager: ProcessGroupManager
) -> dict[str, Counted]:
    """Return what of each parameter's elements on this rank no earlier tp rank has."""
    values = {shard.name: shard.parameter.detach() for shard in shards}
    owned: dict[str, Counted] = {}
    mixed: dict[str, Tensor] = {}
    for name, pieces in split_by_owner(model, values).items():
        own = {owner == manager.tp_rank for owner, _ in pieces}
        if len(own) == 1:
            owned[name] = own.pop()
        else:
            mixed[name] = torch.zeros_like(values[name], dtype=torch.bool)
    for name, pieces in split_by_owner(model, mixed).items():
        for owner, piece in pieces:
            piece.fill_(owner == manager.tp_rank)  # a view of the mask
        owned[name] = mixed[name]
    return owned


def _part(counted: Counted, shard: Shard) -> Counted:
    return counted if isinstance(counted, bool) else counted.flatten()[shard.start : shard.stop]
