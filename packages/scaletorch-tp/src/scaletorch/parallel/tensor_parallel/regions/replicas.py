"""Tensors whose gradient is summed over ranks that hold the same shard.

Key/value heads are an example, if there are fewer of them than ranks: each replica computes the
term of the gradient that its own queries make. So are keys that all heads share: multi-head latent
attention (DeepSeek-V2) projects hidden states to what keys and values of each head are made of,
whose gradient is whole, and to such a key.
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
from ...pg_manager.building import around_compiled, uncompiled
from ...placement import Cut
from .surround import Surrounded


class SumGradient(Function):
    """Identity forward; backward sums the gradient, or a part of it, over ranks.

    Behind it the gradient is the same on all ranks that hold the same shard.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `x`; `total` returns the sum of its gradient."""
        ctx.total = total
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum the gradient."""
        return ctx.total(grads[0]), None


@uncompiled
def sum_gradient(x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `x`, whose gradient is summed by `total`."""
    function: Any = SumGradient
    result: Tensor = function.apply(x, total) if torch.is_grad_enabled() else x
    return result


@uncompiled
def sum_replicas(x: Tensor, cut: Cut, rank: int, group: ProcessGroup | None) -> Tensor:
    """Return `x`, whose gradient is summed over the ranks that hold the same shard of it.

    Args:
        x: [shard, ...], cut along the first dim; each of packed lengths has its own replicas.
        cut: The shard of each rank.
        rank: This rank's place in the group.
        group: The ranks.
    """
    return sum_gradient(x, lambda grad: sum_parts(grad, cut, rank, group))


def sum_parts(x: Tensor, cut: Cut, rank: int, group: ProcessGroup | None) -> Tensor:
    """Return the sum of `x` over the ranks that hold the same shard.

    All ranks of the group add up all replicated shards, with zeros for those that a rank does not
    hold: this needs no groups of fewer ranks, replicas get the same bits, and what is replicated
    is small. Packed lengths that are not replicated are not sent. 16-bit floats are summed in
    float32.
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


class TailShared(Surrounded):
    """A layer that stays whole, of whose output this rank's heads use the last features."""

    shared_features: int

    @around_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward; backward sums the gradient of the last features."""

        def total(grad: Tensor) -> Tensor:
            tail = grad[..., -self.shared_features :].contiguous()
            all_reduce(tail, group=self._tp_group)
            return torch.cat([grad[..., : -self.shared_features], tail], -1)

        return sum_gradient(super().forward(*args, **kwargs), total)
