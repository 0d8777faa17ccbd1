"""Autograd functions behind `functional`: the backward of each applies another one's forward."""

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
    """Apply an autograd function; gives the result a static type."""
    result: Tensor = function.apply(*args)
    return result


def alone(group: Group) -> bool:
    """Return whether the group has one rank, so that every call here is the identity."""
    members = process_group(group)
    return members is None or members.size() == 1


def _back(function: type[Function], grad: Tensor, group: Group, *args: Any) -> Tensor:
    """Apply the forward of another function to a gradient.

    An identity must return the same tensor object: autograd would treat a view as its own and
    accumulate into the caller's tensor.
    """
    if alone(group) or (function is Copy and not torch.is_grad_enabled()):
        return grad
    return apply(function, grad, *args)


class _Whole(Function):
    """Base for functions on whole tensors; forward stores the one for backward in `ctx.way`."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Apply the stored function to the gradient."""
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
    """Base for functions on shards; forward stores the one for backward in `ctx.way`."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Apply the stored function to the gradient, along the same dim."""
        way, dim, group, sizes = ctx.way
        return _back(way, grads[0], group, dim, group, sizes), None, None, None


class AllGather(_Pieces):
    """All-gather along a dim forward; reduce-scatter backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return every rank's `x` joined along `dim`."""
        ctx.way = ReduceScatter, dim, group, sizes
        return pieces.joined(x, dim, group, sizes)


class ReduceScatter(_Pieces):
    """Reduce-scatter along a dim forward; all-gather backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return this rank's shard along `dim` of the sum of every rank's `x`."""
        ctx.way = AllGather, dim, group, sizes
        piece = pieces.summed_piece(x, dim, group, sizes)
        # A model may change the result in place, which autograd forbids for a view made here.
        if not piece._is_view():
            return piece
        alias: Tensor = piece.new_empty(0)
        alias.data = piece
        return alias


class Gather(_Pieces):
    """All-gather along a dim forward; this rank's shard backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return every rank's `x` joined along `dim`."""
        ctx.way = Split, dim, group, sizes
        return pieces.joined(x, dim, group, sizes)


class Split(_Pieces):
    """This rank's shard along a dim forward; all-gather backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return this rank's shard of `x` along `dim`."""
        ctx.way = Gather, dim, group, sizes
        return pieces.own_piece(x, dim, group, sizes)


class AllToAll(Function):
    """All-to-all: split along one dim, join along another; backward swaps the two dims."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, split_dim: int, concat_dim: int, group: Group = None
    ) -> Tensor:
        """Return every rank's shard for this rank, joined along `concat_dim`."""
        ctx.args = concat_dim, split_dim, group
        return pieces.swapped(x, split_dim, concat_dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Send the gradients of the shards back."""
        return _back(AllToAll, grads[0], ctx.args[-1], *ctx.args), None, None, None
