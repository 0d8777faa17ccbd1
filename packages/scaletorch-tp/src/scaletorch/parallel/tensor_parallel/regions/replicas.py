"""Tensors whose gradient is summed over the ranks that hold the same shard.

They are key/value heads if there are fewer than ranks, and the key that all heads share in
multi-head latent attention (DeepSeek-V2), one slice of a projection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ....dist import all_reduce
from ....dist.building import sum_dtype
from ....dist.functional import Reduce, spmd_local
from ...pg_manager.building import around_compiled, uncompiled
from ...placement import Cut
from .surround import Surrounded


class SumGradient(Function):
    """Identity; backward sums the gradient, or a slice of it, over ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, total: Callable[[Tensor], Tensor], group: ProcessGroup | None
    ) -> Tensor:
        """Return `x`; `total` maps its gradient to the sum over ranks."""
        ctx.total, ctx.way = total, (Reduce, group)
        return x.view_as(x)

    @staticmethod
    def spmd_typecheck(output: Tensor, *, x: Tensor) -> None:
        """Give the output the type of `x`, with a gradient that is a term of a sum."""
        spmd_local(output, x, partial=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the summed gradient."""
        return ctx.total(grads[0]), None, None


@uncompiled
def sum_gradient(
    x: Tensor, total: Callable[[Tensor], Tensor], group: ProcessGroup | None
) -> Tensor:
    """Return `x` with a backward that applies `total` to its gradient."""
    function: Any = SumGradient
    result: Tensor = function.apply(x, total, group) if torch.is_grad_enabled() else x
    return result


@uncompiled
def sum_replicas(x: Tensor, cut: Cut, rank: int, group: ProcessGroup | None) -> Tensor:
    """Return `x` with a gradient that is summed over the ranks that hold the same shard."""
    return sum_gradient(x, lambda grad: sum_parts(grad, cut, rank, group), group)


def sum_parts(x: Tensor, cut: Cut, rank: int, group: ProcessGroup | None) -> Tensor:
    """Return the sum of `x` over the ranks that hold the same shard."""
    # One all-reduce of the whole group, with zeros for the shards that a rank does not hold, needs
    # no subgroups and gives replicas the same bits.
    shares = list(x.split([*map(len, cut.ranges[rank])]))
    lengths = [sum(map(len, ranges)) for ranges in cut.shared.values()]
    whole = x.new_zeros((sum(lengths), *x.shape[1:]), dtype=sum_dtype(x.dtype))
    for (place, ranges), total in zip(cut.shared.items(), whole.split(lengths), strict=True):
        held = cut.ranges[rank][place]
        slot = total.narrow(0, held.start - ranges[0].start, len(held))
        slot.copy_(shares[place])
        shares[place] = slot
    all_reduce(whole, group=group)
    return torch.cat([share.to(x.dtype) for share in shares])


class TailShared(Surrounded):
    """A replicated layer whose last output features are used by all heads (`SharedTail`)."""

    shared_features: int

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward; backward sums the gradient of the last features."""

        def total(grad: Tensor) -> Tensor:
            tail = grad[..., -self.shared_features :].contiguous()
            all_reduce(tail, group=self._tp_group)
            return torch.cat([grad[..., : -self.shared_features], tail], -1)

        return sum_gradient(super().forward(*args, **kwargs), total, self._tp_group)
