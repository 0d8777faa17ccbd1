"""The autograd functions behind `functional`: each one's backward applies another's forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from ..wire.backend import process_group
from . import pieces
from .made import tell_made

Group = ProcessGroup | None


def apply(function: type[Function], *args: Any) -> Tensor:
    """Apply an autograd function, with a type."""
    result: Tensor = function.apply(*args)
    return result


def alone(group: Group) -> bool:
    """Return whether there is one rank, so that every call here is the identity."""
    members = process_group(group)
    return members is None or members.size() == 1


def _back(function: type[Function], grad: Tensor, group: Group, *args: Any) -> Tensor:
    """Apply another's forward to a gradient.

    An identity must hand on the very tensor: autograd would take a view of it for its own, and add
    to what is the caller's.
    """
    if alone(group) or (function is Copy and not torch.is_grad_enabled()):
        return grad
    return apply(function, grad, *args)


def _joined(x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None) -> Tensor:
    whole = pieces.joined(x, dim, group, sizes)
    tell_made(whole, lambda own: pieces.joined(own, dim, group, sizes), x)
    return whole


class Copy(Function):
    """Identity forward, sum over the ranks backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group = None) -> Tensor:
        """Return `x`."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum the gradient over the ranks."""
        return _back(Reduce, grads[0], ctx.group, ctx.group), None


class Reduce(Function):
    """Sum over the ranks forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group = None) -> Tensor:
        """Return the sum of every rank's `x`."""
        ctx.group = group
        return pieces.total(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Hand the gradient on."""
        return _back(Copy, grads[0], ctx.group, ctx.group), None


class AllReduce(Function):
    """Sum over the ranks in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group = None) -> Tensor:
        """Return the sum of every rank's `x`."""
        ctx.group = group
        return pieces.total(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum the gradient over the ranks."""
        return _back(AllReduce, grads[0], ctx.group, ctx.group), None


class AllGather(Function):
    """Join along a dim forward; sum and own piece backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return every rank's `x` joined along `dim`."""
        ctx.args = dim, group, sizes
        return _joined(x, dim, group, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum the gradients of the ranks and keep the own piece."""
        dim, group, sizes = ctx.args
        return _back(ReduceScatter, grads[0], group, dim, group, sizes), None, None, None


class ReduceScatter(Function):
    """Sum and own piece forward; join along the dim backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return this rank's piece along `dim` of the sum of every rank's `x`."""
        ctx.args = dim, group, sizes
        return pieces.summed_piece(x, dim, group, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Join the gradients of the pieces."""
        dim, group, sizes = ctx.args
        return _back(AllGather, grads[0], group, dim, group, sizes), None, None, None


class Gather(Function):
    """Join along a dim forward; own piece backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return every rank's `x` joined along `dim`."""
        ctx.args = dim, group, sizes
        return _joined(x, dim, group, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Keep the own piece of the gradient."""
        dim, group, sizes = ctx.args
        return _back(Split, grads[0], group, dim, group, sizes), None, None, None


class Split(Function):
    """Own piece along a dim forward; join backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return this rank's piece of `x` along `dim`."""
        ctx.args = dim, group, sizes
        return pieces.own_piece(x, dim, group, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Join the gradients of the pieces."""
        dim, group, sizes = ctx.args
        return _back(Gather, grads[0], group, dim, group, sizes), None, None, None


class AllToAll(Function):
    """Pieces along one dim sent out, received ones joined along another; backward the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, split_dim: int, concat_dim: int, group: Group = None
    ) -> Tensor:
        """Return what every rank's piece for this one joins to."""
        ctx.args = concat_dim, split_dim, group
        return pieces.swapped(x, split_dim, concat_dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Send the gradients of the pieces back."""
        return _back(AllToAll, grads[0], ctx.args[-1], *ctx.args), None, None, None
