"""Shards that several ranks hold, such as key/value heads of which there are fewer than ranks.

Each replica computes the part of the gradient that its own queries make; the whole one is the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ....dist import all_reduce
from ..cuts.cut import Cut
from .uncompiled import uncompiled


class SumReplicas(Function):
    """Identity forward; backward sums the gradient over the ranks that hold the same part.

    What travels is the whole gradient, zero in other ranks' parts, over the whole group: it needs
    no group of its own, replicas get the same bits, and a replicated parameter is a small one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, rank: int, group: ProcessGroup | None) -> Tensor:
        """Return `x`, which is cut along its first dim."""
        ctx.cut, ctx.rank, ctx.group = cut, rank, group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum over the replicas."""
        return sum_parts(grads[0], ctx.cut, ctx.rank, ctx.group), None, None, None


@uncompiled
def sum_replicas(x: Tensor, cut: Cut, rank: int, group: ProcessGroup | None) -> Tensor:
    """Return `x`, whose gradient is summed over the ranks that hold the same part of it.

    Args:
        x: [part, ...], cut along the first dim.
        cut: Which part each rank has.
        rank: This rank's place in the group.
        group: The ranks.
    """
    function: Any = SumReplicas
    result: Tensor = function.apply(x, cut, rank, group) if torch.is_grad_enabled() else x
    return result


def sum_parts(x: Tensor, cut: Cut, rank: int, group: ProcessGroup | None) -> Tensor:
    """Return the sum of `x` over the ranks that hold the same part."""
    whole = x.new_zeros((cut.whole, *x.shape[1:]))
    cut.take(whole, 0, rank).copy_(x)
    all_reduce(whole, group=group)
    return cut.take(whole, 0, rank).clone()
