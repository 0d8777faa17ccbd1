"""Last features of a whole layer that this rank's heads use, as keys that all heads share.

Multi-head latent attention (DeepSeek-V2) projects hidden states to what keys and values of each
head are made of, by a column-parallel layer, and to a rotated key that is every head's. A rank's
heads make a part of the gradient of that key, while that of the rest is whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ....dist import all_reduce
from ....dist.errors import InvalidArgumentError
from ..regions.surround import Surrounded
from ..regions.uncompiled import around_compiled, uncompiled


@dataclass(frozen=True, slots=True)
class SharedTail:
    """A style for a layer that stays whole, of whose output each head uses the last features.

    The gradient of these is summed over the ranks; the others enter a column-parallel layer.

    Args:
        features: How many.

    Raises:
        InvalidArgumentError: It is not a positive number.

    Example:
        >>> plan = {"**.kv_a_proj_with_mqa": SharedTail(64), "**.kv_b_proj": "column"}
    """

    features: int

    def __post_init__(self) -> None:
        if type(self.features) is not int or self.features < 1:
            raise InvalidArgumentError(
                f"SharedTail takes a number of features, at least 1, got {self.features!r}"
            )

    def misfit(self, module: nn.Module) -> str | None:
        """Return why a module has no such tail, or None if it has."""
        out = getattr(module, "out_features", None)
        if not isinstance(out, int) or out <= self.features:
            return f"it has no more than {self.features} output features ({out})"
        return None


class SumTail(Function):
    """Identity forward; backward sums the gradient of the last features over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, features: int, group: ProcessGroup | None) -> Tensor:
        """Return `x` [..., H]."""
        ctx.features, ctx.group = features, group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum the last features over the ranks."""
        grad = grads[0].clone()
        tail = grad[..., -ctx.features :].contiguous()
        all_reduce(tail, group=ctx.group)
        grad[..., -ctx.features :] = tail
        return grad, None, None


class TailShared(Surrounded):
    """A layer whose output's last features are used by this rank's heads."""

    shared_features: int

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        out = super().forward(*args, **kwargs)
        return _sum_tail(out, self.shared_features, self._tp_group.group)


@uncompiled
def _sum_tail(x: Tensor, features: int, group: ProcessGroup | None) -> Tensor:
    function: Any = SumTail
    result: Tensor = function.apply(x, features, group) if torch.is_grad_enabled() else x
    return result
