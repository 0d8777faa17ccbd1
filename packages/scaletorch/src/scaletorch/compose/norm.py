"""Global gradient norm and clipping: each element of the plain model counts once on any layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..parallel.data_parallel import Shard
from ..parallel.data_parallel.building import (
    clip_by,
    found_on_ranks,
    is_sharded,
    norm_over,
    settled_shards,
)
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.tensor_parallel import split_by_owner
from .experts import expert_names
from .forward import manager_of

# The share of a shard that this rank counts: all (True), nothing (False), or a mask of elements.
Counted = bool | Tensor
_counted: WeakKeyDictionary[nn.Module, tuple[object, list[Counted]]] = WeakKeyDictionary()


def global_grad_norm(
    model: nn.Module, manager: ProcessGroupManager | None = None, *, norm_type: float = 2.0
) -> Tensor:
    """Return the gradient norm of the whole plain model, each element counted once.

    It costs an all-reduce of one number over tp and pp, and over cp x dp if the optimizer or
    gradients are sharded there; over all ranks if experts are divided.

    Args:
        model: The model that `parallelize` returned, with gradients already summed over cp x dp, as
            after `train_step`. A gradient that is None counts as zero.
        manager: The grid; by default the model's.
        norm_type: Order of the norm, above 0; `float("inf")` is the largest element.

    Returns:
        0-d, in the parameters' dtype and float32 at least, the same bits on every rank.

    Raises:
        InvalidArgumentError: `norm_type` is not a number above 0.
    """
    manager = manager_of(model, manager)
    groups = [manager.cp_dp_group] if is_sharded(model) else []
    groups += [manager.tp_group, manager.pp_group]
    if not manager.grid.is_plain:  # experts may differ between ranks along any axis
        groups = [manager.world_group]
    return norm_over(counted_gradients(model, manager), groups, model, norm_type)


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    manager: ProcessGroupManager | None = None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale a parallelized model's gradients in place so that their norm is at most `max_norm`.

    Args:
        model: As in `global_grad_norm`.
        max_norm: At least 0.
        manager: The grid; by default the model's.
        norm_type: As in `global_grad_norm`.
        error_if_nonfinite: Raise if the norm is not finite. If False, a norm that is not finite
            makes gradients NaN or 0, as in torch's function of this name.

    Returns:
        The norm before clipping, as in `global_grad_norm`.

    Raises:
        InvalidArgumentError: `max_norm` or `norm_type` is out of range.
        NonFiniteError: The norm is not finite and `error_if_nonfinite` is set; on every rank, with
            the parameters and their ranks.
    """
    manager = manager_of(model, manager)
    return clip_by(
        lambda: global_grad_norm(model, manager, norm_type=norm_type),
        lambda: nonfinite_gradients(model, manager),
        model,
        max_norm,
        error_if_nonfinite=error_if_nonfinite,
    )


def nonfinite_gradients(
    model: nn.Module, manager: ProcessGroupManager | None = None
) -> list[tuple[str, str]]:
    """Return the gradients that are infinite or NaN, with their ranks; all ranks call it.

    `model` and `manager` are as in `global_grad_norm`.

    Returns:
        A parameter's name and a rank's coordinates, `("norm.weight", "dp0 pp1 cp0 tp1")`, for
        every rank with a non-finite element; sorted by rank, the same list on all ranks.
    """
    manager = manager_of(model, manager)
    place = str(manager.grid.coordinates(manager.global_rank))
    return found_on_ranks(model, manager.world_group, place)


def counted_gradients(model: nn.Module, manager: ProcessGroupManager) -> Iterator[Tensor]:
    """Yield the gradients that this rank adds to the norm; replicas count on their first rank."""
    shards = settled_shards(model)
    alike = not is_sharded(model) and manager.grid.is_plain
    first, first_of_expert = manager.cp_dp_rank == 0 or alike, manager.edp_rank == 0
    experts = expert_names(model)
    for shard, counted in zip(shards, _shares_counted(model, shards, manager), strict=True):
        gradient = shard.tensor.grad
        is_first = first_of_expert if shard.name in experts else first
        if gradient is None or counted is False or (shard.replicated and not is_first):
            continue
        if isinstance(counted, Tensor):
            gradient = gradient.flatten().where(counted, gradient.new_zeros(()))
        yield gradient


def _shares_counted(
    model: nn.Module, shards: Sequence[Shard], manager: ProcessGroupManager
) -> list[Counted]:
    """Return the share of each shard that this rank counts, cached until the shards change."""
    ranges = [(s.name, s.parameter.shape, s.parameter.device, s.start, s.stop) for s in shards]
    key = (ranges, manager.tp_rank, manager.pp_rank)
    known = _counted.get(model)
    if known is None or known[0] != key:
        tied: dict[str, tuple[int, ...]] = getattr(model, "tied_parameters", {})  # of a stage
        on_stage = [tied.get(s.name, (manager.pp_rank,))[0] == manager.pp_rank for s in shards]
        # If each expert is cut over tp (etp = tp), experts count by tp rank like other parameters.
        whole = expert_names(model) if manager.etp_size == 1 else frozenset[str]()
        owned: dict[str, Counted] = dict.fromkeys(whole, True)
        rest = [s for s, own in zip(shards, on_stage, strict=True) if own and s.name not in owned]
        owned |= _owned(model, rest, manager)
        counted = [own and owned[s.name] for s, own in zip(shards, on_stage, strict=True)]
        cut = [
            each if isinstance(each, bool) else each.flatten()[s.start : s.stop]
            for each, s in zip(counted, shards, strict=True)
        ]
        known = _counted[model] = key, cut
    return known[1]


def _owned(
    model: nn.Module, shards: Sequence[Shard], manager: ProcessGroupManager
) -> dict[str, Counted]:
    """Return the elements of each parameter on this rank that no earlier tp rank has."""
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
