"""Differentiable collectives: the backward of each is the forward of another, on the same group.

| call | forward | backward |
| --- | --- | --- |
| `copy(x)` | identity | sum over the ranks |
| `reduce(x)` | sum over the ranks | identity |
| `all_reduce(x)` | sum over the ranks | sum over the ranks |
| `all_gather(x, dim)` | every rank's `x` joined along `dim` | reduce-scatter |
| `reduce_scatter(x, dim)` | this rank's shard of the sum over the ranks | all-gather |
| `gather(x, dim)` | every rank's `x` joined along `dim` | this rank's shard |
| `split(x, dim)` | this rank's shard of `x` along `dim` | all-gather |
| `all_to_all(x, split_dim, concat_dim)` | shard i to rank i, received ones joined | the reverse |

The backwards of `all_reduce`, `all_gather`, `reduce_scatter` and `all_to_all` are exact (adjoint)
if the loss is the sum of the ranks' losses; those of `copy`, `reduce`, `gather` and `split`, if
every rank computes the same loss. No call changes its input. With one rank nothing is sent and `x`
itself may be returned. Backward communicates, so every rank of the group must run it, in the same
order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import pieces
from .collectives.autograd import (
    AllGather,
    AllReduce,
    AllToAll,
    Copy,
    Gather,
    Reduce,
    ReduceScatter,
    Split,
    alone,
    apply,
)
from .errors import InvalidArgumentError
from .wire.checks import tells_failure

Group = ProcessGroup | None

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Copy",
    "Gather",
    "Reduce",
    "ReduceScatter",
    "Split",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "copy",
    "gather",
    "reduce",
    "reduce_scatter",
    "split",
]


def _stays(x: Tensor, group: Group) -> bool:
    """Return whether the group has one rank, so that nothing is sent."""
    if not isinstance(x, Tensor):
        raise InvalidArgumentError(f"expected a tensor, got {type(x).__name__}")
    return alone(group)


def copy(x: Tensor, group: Group = None) -> Tensor:
    """Return `x`; backward sums the gradient over the ranks (enters a parallel region).

    Args:
        x: Any shape; the same values on every rank.
        group: The ranks; the default group by default.
    """
    return x if _stays(x, group) or not torch.is_grad_enabled() else apply(Copy, x, group)


@tells_failure
def reduce(x: Tensor, group: Group = None) -> Tensor:
    """Return the sum of every rank's `x`; the gradient passes unchanged (leaves a parallel region).

    Args:
        x: Any shape, equal on every rank.
        group: The ranks; the default group by default.
    """
    return x if _stays(x, group) else apply(Reduce, x, group)


@tells_failure
def all_reduce(x: Tensor, group: Group = None) -> Tensor:
    """Return the sum of every rank's `x`; backward sums the gradient over the ranks too.

    Args:
        x: Any shape, equal on every rank.
        group: The ranks; the default group by default.
    """
    return x if _stays(x, group) else apply(AllReduce, x, group)


@tells_failure
def all_gather(
    x: Tensor, dim: int, group: Group = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return every rank's `x` joined along `dim`; backward reduce-scatters the gradient.

    Args:
        x: The same shape on every rank, except along `dim` if `sizes` is given.
        dim: The dim to join along; may be negative.
        group: The ranks; the default group by default.
        sizes: The length along `dim` on each rank, if they differ.

    Raises:
        InvalidArgumentError: `dim` is out of range, or `sizes` do not fit.
    """
    if _stays(x, group):
        return pieces.joined(x, dim, group, sizes)
    return apply(AllGather, x, dim, group, sizes)


@tells_failure
def reduce_scatter(
    x: Tensor, dim: int, group: Group = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Sum `x` over the ranks and return this rank's shard along `dim`; backward all-gathers.

    16-bit floats may be summed in float32 and rounded once.

    Args:
        x: The same shape on every rank.
        dim: The dim to shard; the number of ranks must divide it, unless `sizes` is given.
        group: The ranks; the default group by default.
        sizes: The length along `dim` of each rank's shard, if they differ.

    Raises:
        InvalidArgumentError: `dim` is out of range or not divisible, or `sizes` do not fit.
    """
    if _stays(x, group):
        return pieces.summed_piece(x, dim, group, sizes)
    return apply(ReduceScatter, x, dim, group, sizes)


@tells_failure
def gather(
    x: Tensor, dim: int, group: Group = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return every rank's `x` joined along `dim`; backward keeps this rank's shard.

    Args:
        x: As in `all_gather`.
        dim: As in `all_gather`.
        group: As in `all_gather`.
        sizes: As in `all_gather`.

    Raises:
        InvalidArgumentError: As in `all_gather`.
    """
    if _stays(x, group):
        return pieces.joined(x, dim, group, sizes)
    return apply(Gather, x, dim, group, sizes)


def split(
    x: Tensor, dim: int, group: Group = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return a copy of this rank's shard of `x` along `dim`; backward joins the gradients.

    Args:
        x: The same values on every rank.
        dim: As in `reduce_scatter`.
        group: As in `reduce_scatter`.
        sizes: As in `reduce_scatter`.

    Raises:
        InvalidArgumentError: As in `reduce_scatter`.
    """
    if _stays(x, group):
        return pieces.own_piece(x, dim, group, sizes)
    return apply(Split, x, dim, group, sizes)


@tells_failure
def all_to_all(x: Tensor, split_dim: int, concat_dim: int, group: Group = None) -> Tensor:
    """Send shard i of `x` along `split_dim` to rank i; join the received ones along `concat_dim`.

    Args:
        x: The same shape on every rank.
        split_dim: The dim to split; the number of ranks must divide it.
        concat_dim: The dim to join along; both may be negative.
        group: The ranks; the default group by default.

    Raises:
        InvalidArgumentError: A dim is out of range, or `split_dim` is not divisible.
    """
    if _stays(x, group):
        return pieces.swapped(x, split_dim, concat_dim, group)
    return apply(AllToAll, x, split_dim, concat_dim, group)
