"""Shards that several ranks hold, such as key/value heads of which there are fewer than ranks.

Each replica computes the part of the gradient that its own queries make; the whole one is the sum.
So it is with keys that all heads share: multi-head latent attention (DeepSeek-V2) projects hidden
states to what keys and values of each head are made of, whose gradient is whole, and to such a key.
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
from ...pg_manager.building import around_compiled, uncompiled
from ...placement import Cut
from .surround import Surrounded


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
    shares = list(x.split([*map(len, cut.ranges[rank])]))
    lengths = [sum(map(len, ranges)) for ranges in cut.shared.values()]
    whole = x.new_zeros((sum(lengths), *x.shape[1:]), dtype=sum_dtype(x.dtype))
    for (place, ranges), each in zip(cut.shared.items(), whole.split(lengths), strict=True):
        own = cut.ranges[rank][place]
        mine = each.narrow(0, own.start - ranges[0].start, len(own))
        mine.copy_(shares[place])
        shares[place] = mine
    all_reduce(whole, group=group)
    return torch.cat([share.to(x.dtype) for share in shares])


class SumTail(Function):
    """Identity forward; backward sums the gradient of the last features over the ranks.

    It is a function of its own since walks through graphs tell nodes apart, and no slices: behind
    it all of the gradient is the same on every rank.
    """

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
    """A layer that stays whole, of whose output this rank's heads use the last features."""

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
