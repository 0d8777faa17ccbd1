"""Loss scaling for float16 with agreement between ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....dist import all_reduce
from ....dist.devices import current_device
from ....dist.errors import InvalidArgumentError
from ...pg_manager import axis_group
from ..sharding.gather import settle


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
        if not 0 < init_scale < math.inf:
            message = f"init_scale must be a finite number above 0, got {init_scale!r}"
            raise InvalidArgumentError(message)
        if not (1 < growth_factor < math.inf and 0 < backoff_factor < 1 <= growth_interval):
            message = (
                "growth_factor must be a finite number above 1, backoff_factor between 0 and 1, "
                "and growth_interval at least 1 step, got "
                f"{growth_factor!r}, {backoff_factor!r} and {growth_interval!r}"
            )
            raise InvalidArgumentError(message)
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
