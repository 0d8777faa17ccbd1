"""Gradients that ranks hold whole or in shards: their norm, clipping, and loss scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...dist import all_reduce, get_comm_device, get_rank, group_ranks
from ...dist.devices import current_device
from ...dist.errors import InvalidArgumentError, NonFiniteError
from ..pg_manager import axis_group, describe_rank
from .parameters import Found, name_culprits, share_names
from .sharding.gather import settle
from .sharding.shards import check_module, is_sharded, parameter_shards, settled_shards


def global_grad_norm(
    model: nn.Module, group: ProcessGroup | None = None, *, norm_type: float = 2.0
) -> Tensor:
    """Return the norm of the whole gradient, each element counted once over the group.

    It uses the current gradients, already summed over the group. Gradients that every rank holds
    need no communication; shards cost one all-reduce of one number.

    Args:
        model: A data-parallel wrapper, or any module.
        group: The ranks that hold the shards, by default the `cp_dp` axis; it includes the
            wrapper's other `groups`.
        norm_type: Order of the norm, above 0; `float("inf")` is the largest element.

    Returns:
        0-d, in the parameters' dtype and float32 at least, the same bits on every rank. A
        gradient that is None counts nothing.

    Raises:
        InvalidArgumentError: `norm_type` is not a number above 0, or parameters are reduced over
            ranks outside the group.
        StateError: No group to be found, or a gradient in shards has not been synchronised.
    """
    return norm_over(_counted_gradients(model, group), _sum_groups(model, group), model, norm_type)


def norm_over(
    gradients: Iterable[Tensor],
    groups: Sequence[ProcessGroup | None],
    model: nn.Module,
    norm_type: float = 2.0,
) -> Tensor:
    """Return the norm of gradients over ranks, for any layout.

    Args:
        gradients: The gradients that this rank counts; each element is counted on one rank. They
            are read only after `norm_type` was checked.
        groups: Groups to sum over, one after another; the same on every rank.
        model: The model, whose parameters give the dtype and device of the result.
        norm_type: Order of the norm, above 0; `float("inf")` is the largest element.

    Result and errors are those of `global_grad_norm`.
    """
    try:
        order = float(norm_type)
    except (TypeError, ValueError):
        order = math.nan
    if not order > 0:
        raise InvalidArgumentError(f"norm_type must be a number above 0, or inf, got {norm_type!r}")
    check_module(model)
    dtype, first = torch.float32, next(model.parameters(), None)
    for parameter in model.parameters():
        dtype = torch.promote_types(dtype, parameter.dtype.to_real())
    device = get_comm_device(groups[0] if groups else None) if first is None else first.device
    total = _power_sum(gradients, order, device)
    for group in groups:
        all_reduce(total, "max" if order == math.inf else "sum", group)
    if order not in (1, math.inf):
        total = total.sqrt() if order == 2 else total.pow(1 / order)
    return total.to(dtype)


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    group: ProcessGroup | None = None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their norm is at most `max_norm`; return the norm before.

    Args:
        model: As in `global_grad_norm`.
        max_norm: At least 0.
        group: As in `global_grad_norm`.
        norm_type: As in `global_grad_norm`.
        error_if_nonfinite: Raise if the norm is not finite. Otherwise gradients then become
            NaN or 0, as with torch's function of this name.

    Raises:
        InvalidArgumentError: `max_norm` or `norm_type` is not a number in its range.
        NonFiniteError: On every rank, with the parameters and their ranks.
        StateError: No group to be found.
    """
    return clip_by(
        lambda: global_grad_norm(model, group, norm_type=norm_type),
        lambda: found_on_ranks(
            model, axis_group("cp_dp", group), alone=not _sum_groups(model, group)
        ),
        model,
        max_norm,
        error_if_nonfinite=error_if_nonfinite,
    )


def clip_by(
    norm: Callable[[], Tensor],
    find_culprits: Callable[[], Found],
    model: nn.Module,
    max_norm: float,
    *,
    error_if_nonfinite: bool,
) -> Tensor:
    """Clip by a norm that is the same on every rank; other arguments as of `clip_grad_norm_`.

    `find_culprits` returns the gradients that are not finite, for the error.
    """
    if not isinstance(max_norm, int | float) or not max_norm >= 0:
        raise InvalidArgumentError(f"max_norm must be a number of at least 0, got {max_norm!r}")
    found = norm()
    if error_if_nonfinite and not found.isfinite():
        text = name_culprits(find_culprits())
        text = text or "every gradient is finite, but the norm is beyond its dtype"
        raise NonFiniteError(
            f"the norm of the gradients is {found.item()}, so they cannot be clipped: {text}. Skip "
            "the step (a GradScaler does by itself), or pass error_if_nonfinite=False"
        )
    factor = (max_norm / (found + 1e-6)).clamp(max=1.0)  # torch's
    _multiply((shard.tensor.grad for shard in settled_shards(model)), factor)
    return found


def scale_gradients(model: nn.Module, factor: Tensor) -> None:
    """Multiply the gradients of the next step by one factor, in place.

    Args:
        model: A data-parallel wrapper whose gradients are synchronised, or any module.
        factor: 0-d, the same on every rank; the host does not wait for it.

    Raises:
        StateError: A gradient in shards has not been synchronised.
    """
    settled_shards(model)
    _multiply((shard.tensor.grad for shard in parameter_shards(model)), factor)


@torch.no_grad()
def _multiply(gradients: Iterable[Tensor | None], factor: Tensor) -> None:
    """Multiply tensors in place, those of one device and dtype in one kernel.

    `torch._foreach_mul_` multiplies a list in one kernel only by a factor of its dtype, and the
    factor for 16 bits is in float32: the operator of `GradScaler` multiplies any list by a float32.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient is None:
            continue
        if type(gradient) is Tensor and not gradient.is_sparse:
            kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        else:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
    for (device, dtype), same in kinds.items():
        if dtype in (torch.bfloat16, torch.float16):
            unread = torch.zeros(1, device=device)
            exact = factor.to(device, torch.float32)
            torch._amp_foreach_non_finite_check_and_unscale_(same, unread, exact)
        else:
            torch._foreach_mul_(same, factor.to(device, dtype))


def _sum_groups(model: nn.Module, group: ProcessGroup | None) -> list[ProcessGroup | None]:
    """Return the groups whose ranks' gradients add up; none if all ranks have the same."""
    return [group] if is_sharded(model) or getattr(model, "parameter_groups", None) else []


def _counted_gradients(model: nn.Module, group: ProcessGroup | None) -> Iterator[Tensor]:
    """Yield the gradients that this rank counts: its shards, and those it is the first to hold."""
    usual = axis_group("cp_dp", group)
    groups: Mapping[str, ProcessGroup | None] = getattr(model, "parameter_groups", {})
    members = {rank for other in groups.values() for rank in group_ranks(other)}
    if not members <= {*group_ranks(usual)}:
        raise InvalidArgumentError(
            f"{describe_rank()}: the wrapper reduces some parameters over ranks that are not in "
            "the group of the norm: use that of scaletorch.compose, which counts over the grid"
        )
    everything = not _sum_groups(model, group)
    for shard in settled_shards(model):
        first = everything or group_ranks(groups.get(shard.name, usual))[0] == get_rank()
        if shard.tensor.grad is not None and (first or not shard.replicated):
            yield shard.tensor.grad


def _power_sum(gradients: Iterable[Tensor], order: float, device: torch.device) -> Tensor:
    """Return the sum of the elements' powers, or their maximum for infinity, 0-d float64."""
    # One dtype lets all ranks add up, and squares of float32 norms do not overflow.
    wide = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            values = _values(gradient.detach())
            kinds.setdefault((values.device, values.dtype), []).append(values)
    norms = [torch.zeros(1, dtype=wide, device=device)]
    for (_, dtype), same in kinds.items():
        exact = torch.promote_types(dtype, torch.float32)
        found = torch._foreach_norm(same, order, dtype=exact)
        norms.append(torch.stack(found).to(device, wide))
    joined = torch.cat(norms)
    return joined.amax() if order == math.inf else joined.pow(order).sum()


def _values(gradient: Tensor) -> Tensor:
    """Return a gradient, or the values of a sparse one."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def found_on_ranks(
    model: nn.Module, group: ProcessGroup | None, place: str | None = None, *, alone: bool = False
) -> Found:
    """Return all ranks' non-finite gradients by rank; every rank of the group calls it.

    Args:
        model: A data-parallel wrapper, or any module.
        group: The ranks to examine.
        place: This rank's name; by default its coordinates in the grid, or its number without one.
        alone: Examine this rank only, since the others have the same gradients.
    """
    found = [
        (shard.name, _values(shard.tensor.grad).isfinite().all().cpu())
        for shard in settled_shards(model)
        if shard.tensor.grad is not None and shard.stop > shard.start
    ]
    names = list(dict.fromkeys(name for name, finite in found if not finite))
    return share_names(names, group, place, alone=alone)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose ranks skip a step, or change the scale, together.

    An overflow on one rank counts on all, at the cost of one all-reduce of one number for each
    optimizer and step. Its methods and their results are torch's own. Every rank calls `step` for
    the same number of optimizers and then `update`, also a rank that has no gradient, or that did
    not `scale` a loss because it has another stage of a pipeline.

    Gradients are whole or float32 shards, as the optimizer's `param_groups` hold them. float16
    gradients are refused, as by torch: keep parameters, or their shards, in float32.

    Args:
        device: Type of the device of the optimizer's tensors; None is that of this process.
        init_scale: The initial scale.
        growth_factor: Factor of the scale after `growth_interval` good steps.
        backoff_factor: Factor of the scale after a skipped step.
        growth_interval: Consecutive good steps before the scale grows.
        enabled: If False, nothing is scaled, and steps are the optimizer's.
        group: The ranks that agree, by default all of the current grid.

    Raises:
        InvalidArgumentError: A scale or interval that is not above 0, a `growth_factor` of at
            most 1, or a `backoff_factor` that is not between 0 and 1.
        StateError: Several ranks, and neither a group nor a process group manager.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        group: ProcessGroup | None = None,
    ) -> None:
        kind = current_device().type if device is None else torch.device(device).type
        grows = 0 < init_scale < math.inf and 1 < growth_factor < math.inf
        if not (grows and 0 < backoff_factor < 1 <= growth_interval):
            raise InvalidArgumentError(
                "init_scale must be above 0 and finite, growth_factor above 1 and finite, "
                "backoff_factor between 0 and 1, and growth_interval at least 1 step, got "
                f"{init_scale!r}, {growth_factor!r}, {backoff_factor!r} and {growth_interval!r}"
            )
        super().__init__(kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        if self._enabled:
            self._group = axis_group("world", group)
            # torch does this in the first `scale`, but some ranks have no loss.
            self._lazy_init_scale_growth_tracker(torch.device(kind))

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        settle(optimizer)
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        anywhere = found_inf.clone()
        for overflow in found.values():
            anywhere += overflow.to(anywhere.device)
        all_reduce(anywhere, "max", self._group)
        return {anywhere.device: anywhere}
