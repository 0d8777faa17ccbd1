"""Differentiable collectives: each one's backward is another's forward, over the same group.

| call | forward | backward |
| --- | --- | --- |
| `copy(x)` | identity | sum over the ranks |
| `reduce(x)` | sum over the ranks | identity |
| `all_reduce(x)` | sum over the ranks | sum over the ranks |
| `all_gather(x, dim)` | everyone's `x` joined along `dim` | sum over the ranks, own piece of it |
| `reduce_scatter(x, dim)` | sum over the ranks, own piece of it | everyone's piece joined |
| `gather(x, dim)` | everyone's `x` joined along `dim` | own piece |
| `split(x, dim)` | own piece of `x` along `dim` | everyone's piece joined |
| `all_to_all(x, split_dim, concat_dim)` | piece i to rank i, received ones joined | the way back |

`all_reduce`, `all_gather`, `reduce_scatter` and `all_to_all` are adjoints where the loss is the
sum of the ranks' losses. `copy`, `reduce`, `gather` and `split` are for a loss that every rank
computes alike. No call changes its input. With one rank nothing is sent and `x` itself may
come back. Backward communicates, so every rank of the group must run it, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from . import pieces
from .raw import process_group

Group = ProcessGroup | None


def _one(group: Group) -> bool:
    group = process_group(group)
    return group is None or group.size() == 1


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
        return reduce(grads[0], ctx.group), None


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
        return copy(grads[0], ctx.group), None


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
        return all_reduce(grads[0], ctx.group), None


class AllGather(Function):
    """Join along a dim forward; sum and own piece backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return every rank's `x` joined along `dim`."""
        ctx.args = dim, group, sizes
        return pieces.joined(x, dim, group, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum the gradients of the ranks and keep the own piece."""
        dim, group, sizes = ctx.args
        return reduce_scatter(grads[0], dim, group, sizes=sizes), None, None, None


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
        return all_gather(grads[0], dim, group, sizes=sizes), None, None, None


class Gather(Function):
    """Join along a dim forward; own piece backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: Group = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return every rank's `x` joined along `dim`."""
        ctx.args = dim, group, sizes
        return pieces.joined(x, dim, group, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Keep the own piece of the gradient."""
        dim, group, sizes = ctx.args
        return split(grads[0], dim, group, sizes=sizes), None, None, None


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
        return gather(grads[0], dim, group, sizes=sizes), None, None, None


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
        return all_to_all(grads[0], *ctx.args), None, None, None


def copy(x: Tensor, group: Group = None) -> Tensor:
    """Return `x`; its gradient is summed over the ranks (the start of a parallel region).

    Args:
        x: any shape; the same on every rank.
        group: the ranks; the default group by default.
    """
    return x if _one(group) else _apply(Copy, x, group)


def reduce(x: Tensor, group: Group = None) -> Tensor:
    """Return the sum of every rank's `x`; the gradient passes as it is (the end of a region).

    Args:
        x: any shape, the same one on every rank.
        group: the ranks; the default group by default.
    """
    return x if _one(group) else _apply(Reduce, x, group)


def all_reduce(x: Tensor, group: Group = None) -> Tensor:
    """Return the sum of every rank's `x`; the gradient is summed over the ranks too.

    Args:
        x: any shape, the same one on every rank.
        group: the ranks; the default group by default.
    """
    return x if _one(group) else _apply(AllReduce, x, group)


def all_gather(
    x: Tensor, dim: int, group: Group = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return every rank's `x` joined along `dim`; the gradient is summed, own piece kept.

    Args:
        x: the same shape on every rank, but for `dim` where `sizes` is given.
        dim: the dim to join along; may be negative.
        group: the ranks; the default group by default.
        sizes: the length along `dim` on each rank, where they differ.

    Raises:
        InvalidArgumentError: no such dim, or `sizes` do not fit.
    """
    return _apply(AllGather, x, dim, group, sizes)


def reduce_scatter(
    x: Tensor, dim: int, group: Group = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return this rank's piece along `dim` of the sum of every rank's `x`; backward joins.

    16-bit floats may be summed in float32 and rounded once.

    Args:
        x: the same shape on every rank.
        dim: the dim to cut; the number of ranks divides it, or `sizes` is given.
        group: the ranks; the default group by default.
        sizes: the length along `dim` of each rank's piece, where they differ.

    Raises:
        InvalidArgumentError: no such dim, it does not divide, or `sizes` do not fit.
    """
    return _apply(ReduceScatter, x, dim, group, sizes)


def gather(
    x: Tensor, dim: int, group: Group = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return every rank's `x` joined along `dim`; the gradient is cut to the own piece.

    Args:
        x: the same shape on every rank, but for `dim` where `sizes` is given.
        dim: the dim to join along; may be negative.
        group: the ranks; the default group by default.
        sizes: the length along `dim` on each rank, where they differ.

    Raises:
        InvalidArgumentError: no such dim, or `sizes` do not fit.
    """
    return _apply(Gather, x, dim, group, sizes)


def split(
    x: Tensor, dim: int, group: Group = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return this rank's piece of `x` along `dim`, copied; the gradients' pieces are joined.

    Args:
        x: the same on every rank.
        dim: the dim to cut; the number of ranks divides it, or `sizes` is given.
        group: the ranks; the default group by default.
        sizes: the length along `dim` of each rank's piece, where they differ.

    Raises:
        InvalidArgumentError: no such dim, it does not divide, or `sizes` do not fit.
    """
    return _apply(Split, x, dim, group, sizes)


def all_to_all(x: Tensor, split_dim: int, concat_dim: int, group: Group = None) -> Tensor:
    """Send piece i of `x` along `split_dim` to rank i; join what came along `concat_dim`.

    Args:
        x: the same shape on every rank.
        split_dim: the dim to cut; the number of ranks divides it.
        concat_dim: the dim to join along; both may be negative.
        group: the ranks; the default group by default.

    Raises:
        InvalidArgumentError: no such dim, or `split_dim` does not divide.
    """
    return _apply(AllToAll, x, split_dim, concat_dim, group)


def _apply(function: type[Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result
