"""The norm of gradients that data-parallel ranks hold whole or in shards, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ....dist import all_reduce, get_comm_device, get_rank, group_ranks
from ....dist.errors import InvalidArgumentError
from ...pg_manager import axis_group
from ..shards import Shard, is_sharded, settled_shards
from .nonfinite import found_on_ranks, refuse_nonfinite


def global_grad_norm(
    model: nn.Module, group: ProcessGroup | None = None, *, norm_type: float = 2.0
) -> Tensor:
    """Return the norm of the whole gradient, each element counted once over the group.

    Gradients are those that a step would take now, already summed over the group. What every rank
    holds is not communicated; shards cost one all-reduce of one number.

    Args:
        model: A data-parallel wrapper, or any module.
        group: The ranks that shards are divided over, by default the ``cp_dp`` axis.
        norm_type: Order of the norm, above 0; ``float("inf")`` is the largest element.

    Returns:
        0-d, in the parameters' dtype and float32 at least, the same bits on every rank. A
        gradient that is None counts nothing.

    Raises:
        InvalidArgumentError: ``norm_type`` is not a number above 0.
        StateError: No group to be found, or a gradient in shards has not been synchronised.
    """
    order, group = checked_order(norm_type), axis_group("cp_dp", group)
    shards, reduced = settled_shards(model), is_sharded(model)
    first = group_ranks(group)[0] == get_rank()
    counted = [s for s in shards if first or not (s.replicated and reduced)]
    total = power_sum(gradients_of(counted), order, device_of(model, group))
    if reduced:
        all_reduce(total, "max" if order == math.inf else "sum", group)
    return root(total, order, model)


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    group: ProcessGroup | None = None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``; return the norm before.

    Args:
        model: As in `global_grad_norm`.
        max_norm: At least 0.
        group: As in `global_grad_norm`.
        norm_type: As in `global_grad_norm`.
        error_if_nonfinite: Raise where the norm is no finite number. Otherwise gradients become
            NaN or 0 then, as with torch's function of this name.

    Raises:
        InvalidArgumentError: ``max_norm`` or ``norm_type`` is no such number.
        NonFiniteError: On every rank, with the parameters and their ranks.
        StateError: No group to be found.
    """
    check_max_norm(max_norm)
    norm = global_grad_norm(model, group, norm_type=norm_type)
    if error_if_nonfinite and not norm.isfinite():
        group = axis_group("cp_dp", group)
        refuse_nonfinite(norm, found_on_ranks(model, group, alone=not is_sharded(model)))
    scale_gradients(settled_shards(model), max_norm, norm)
    return norm


def gradients_of(shards: Iterable[Shard]) -> list[Tensor]:
    """Return the gradients that there are."""
    return [shard.tensor.grad for shard in shards if shard.tensor.grad is not None]


def power_sum(gradients: Iterable[Tensor], order: float, device: torch.device) -> Tensor:
    """Return the sum of the elements' powers, their maximum for infinity, 0-d float64.

    So all ranks have one dtype to add up in, and squares of float32 norms do not overflow.
    """
    wide = torch.float32 if device.type == "mps" else torch.float64  # which mps lacks
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient.detach())
    norms = [torch.zeros(1, dtype=wide, device=device)]
    for (_, dtype), alike in kinds.items():
        exact = torch.promote_types(dtype, torch.float32)
        found = torch._foreach_norm(alike, order, dtype=exact)
        norms.append(torch.stack(found).to(device, wide))
    joined = torch.cat(norms)
    return joined.amax() if order == math.inf else joined.pow(order).sum()


def root(total: Tensor, order: float, model: nn.Module) -> Tensor:
    """Return the norm of all ranks' `power_sum`, in the parameters' dtype, float32 at least."""
    dtype = torch.float32
    for parameter in model.parameters():
        dtype = torch.promote_types(dtype, parameter.dtype)
    if order in (1.0, math.inf):
        return total.to(dtype)
    return (total.sqrt() if order == 2.0 else total.pow(1 / order)).to(dtype)


def scale_gradients(shards: Sequence[Shard], max_norm: float, norm: Tensor) -> None:
    """Scale the shards' gradients in place, by at most 1."""
    torch.nn.utils.clip_grads_with_norm_([shard.tensor for shard in shards], max_norm, norm)


def device_of(model: nn.Module, group: ProcessGroup | None) -> torch.device:
    """Return where the first parameter is, or what the group communicates on without any."""
    first = next(model.parameters(), None)
    return first.device if first is not None else get_comm_device(group)


def checked_order(norm_type: float) -> float:
    """Return ``norm_type`` as a float; refuse what is no order of a norm."""
    try:
        order = float(norm_type)
    except (TypeError, ValueError):
        order = math.nan
    if not order > 0:
        message = f"norm_type must be a number above 0, or inf, got {norm_type!r}"
        raise InvalidArgumentError(message)
    return order


def check_max_norm(max_norm: float) -> None:
    """Refuse what gradients cannot be clipped to."""
    if not isinstance(max_norm, int | float) or not max_norm >= 0:
        message = f"max_norm must be a number of at least 0, got {max_norm!r}"
        raise InvalidArgumentError(message)
