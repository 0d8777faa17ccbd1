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
from ....dist.building import sum_dtype
from ..cuts.cut import Cut
from .uncompiled import uncompiled


class SumReplicas(Function):
    """Identity forward; backward sums the gradient over the ranks that hold the same part.

    What travels is the whole gradient, zero in other ranks' parts, over the whole group: it needs
    no group of its own, replicas get the same bits, and what is replicated is small.
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

    Of packed parts each is summed over its own replicas.

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
    """Return the sum of `x` over the ranks that hold the same part.

    Of packed parts those that are replicated are summed, in one collective: others stay here.
    16-bit floats are summed in float32.
    """
    shares = list(x.split([part.sizes[rank] for part in cut.packed]))
    shared = [number for number, part in enumerate(cut.packed) if part.replicated]
    lengths = [cut.packed[number].whole for number in shared]
    whole = x.new_zeros((sum(lengths), *x.shape[1:]), dtype=sum_dtype(x.dtype))
    for number, part in zip(shared, whole.split(lengths), strict=True):
        mine = cut.packed[number].take(part, 0, rank)
        mine.copy_(shares[number])
        shares[number] = mine
    all_reduce(whole, group=group)
    return torch.cat([share.to(x.dtype) for share in shares])
