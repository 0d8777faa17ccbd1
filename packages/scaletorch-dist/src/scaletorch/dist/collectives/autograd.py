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


class _Whole(Function):
    """Base of those of whole tensors; the gradient takes the way that forward has noted."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Let the gradient go that way."""
        way, group = ctx.way
        return _back(way, grads[0], group, group), None


class Copy(_Whole):
    """Identity forward, sum over the ranks backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group = None) -> Tensor:
        """Return `x`."""
        ctx.way = Reduce, group
        return x.view_as(x)


class Reduce(_Whole):
    """Sum over the ranks forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group = None) -> Tensor:
        """Return the sum of every rank's `x`."""
        ctx.way = Copy, group
        return pieces.total(x, group)


class AllReduce(_Whole):
    """Sum over the ranks in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group = None) -> Tensor:
        """Return the sum of every rank's `x`."""
        ctx.way = AllReduce, group
        return pieces.total(x, group)


class _Pieces(Function):
    """Base of those of pieces along a dim; the gradient takes the way that forward has noted."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Let the gradient go that way, along the same dim."""
        way, dim, group, sizes = ctx.way
        return _back(way, grads[0], group, dim, group, sizes), None, None, None


class AllGather(_Pieces):
    """Join along a dim forward; sum and own piece backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return every rank's `x` joined along `dim`."""
        ctx.way = ReduceScatter, dim, group, sizes
        return pieces.joined(x, dim, group, sizes)


class ReduceScatter(_Pieces):
    """Sum and own piece forward; join along the dim backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return this rank's piece along `dim` of the sum of every rank's `x`."""
        ctx.way = AllGather, dim, group, sizes
        piece = pieces.summed_piece(x, dim, group, sizes)
        # No view of what was received: what a model adds to in place must not be one.
        if not piece._is_view():
            return piece
        alias: Tensor = piece.new_empty(0)
        alias.data = piece
        return alias


class Gather(_Pieces):
    """Join along a dim forward; own piece backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return every rank's `x` joined along `dim`."""
        ctx.way = Split, dim, group, sizes
        return pieces.joined(x, dim, group, sizes)


class Split(_Pieces):
    """Own piece along a dim forward; join backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return this rank's piece of `x` along `dim`."""
        ctx.way = Gather, dim, group, sizes
        return pieces.own_piece(x, dim, group, sizes)


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
