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

`all_reduce`, `all_gather`, `reduce_scatter` and `all_to_all` are adjoints if the loss is the
sum of the ranks' losses. `copy`, `reduce`, `gather` and `split` are for one loss that every rank
computes. No call changes its input. With one rank nothing is sent and `x` itself may
come back. Backward communicates, so every rank of the group must run it, in the same order.
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
    """Return whether nothing is to be sent."""
    if not isinstance(x, Tensor):
        raise InvalidArgumentError(f"expected a tensor, got {type(x).__name__}")
    return alone(group)


def copy(x: Tensor, group: Group = None) -> Tensor:
    """Return `x`; its gradient is summed over the ranks (the start of a parallel region).

    Args:
        x: Any shape; the same on every rank.
        group: The ranks; the default group by default.
    """
    return x if _stays(x, group) or not torch.is_grad_enabled() else apply(Copy, x, group)


@tells_failure
def reduce(x: Tensor, group: Group = None) -> Tensor:
    """Return the sum of every rank's `x`; the gradient passes as it is (the end of a region).

    Args:
        x: Any shape, the same one on every rank.
        group: The ranks; the default group by default.
    """
    return x if _stays(x, group) else apply(Reduce, x, group)


@tells_failure
def all_reduce(x: Tensor, group: Group = None) -> Tensor:
    """Return the sum of every rank's `x`; the gradient is summed over the ranks too.

    Args:
        x: Any shape, the same one on every rank.
        group: The ranks; the default group by default.
    """
    return x if _stays(x, group) else apply(AllReduce, x, group)


@tells_failure
def all_gather(
    x: Tensor, dim: int, group: Group = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return every rank's `x` joined along `dim`; the gradient is summed, own piece kept.

    Args:
        x: The same shape on every rank, but for `dim` where `sizes` is given.
        dim: The dim to join along; may be negative.
        group: The ranks; the default group by default.
        sizes: The length along `dim` on each rank, if they differ.

    Raises:
        InvalidArgumentError: No such dim, or `sizes` do not fit.
    """
    if _stays(x, group):
        return pieces.joined(x, dim, group, sizes)
    return apply(AllGather, x, dim, group, sizes)


@tells_failure
def reduce_scatter(
    x: Tensor, dim: int, group: Group = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return this rank's piece along `dim` of the sum of every rank's `x`; backward joins.

    16-bit floats may be summed in float32 and rounded once.

    Args:
        x: The same shape on every rank.
        dim: The dim to cut; the number of ranks divides it, or `sizes` is given.
        group: The ranks; the default group by default.
        sizes: The length along `dim` of each rank's piece, if they differ.

    Raises:
        InvalidArgumentError: No such dim, it does not divide, or `sizes` do not fit.
    """
    if _stays(x, group):
        return pieces.summed_piece(x, dim, group, sizes)
    return apply(ReduceScatter, x, dim, group, sizes)


@tells_failure
def gather(
    x: Tensor, dim: int, group: Group = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return every rank's `x` joined along `dim`; the gradient is cut to the own piece.

    Args:
        x: As in `all_gather`.
        dim: As there.
        group: As there.
        sizes: As there.

    Raises:
        InvalidArgumentError: As there.
    """
    if _stays(x, group):
        return pieces.joined(x, dim, group, sizes)
    return apply(Gather, x, dim, group, sizes)


def split(
    x: Tensor, dim: int, group: Group = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return this rank's piece of `x` along `dim`, copied; the gradients' pieces are joined.

    Args:
        x: The same on every rank.
        dim: As in `reduce_scatter`.
        group: As there.
        sizes: As there.

    Raises:
        InvalidArgumentError: As there.
    """
    if _stays(x, group):
        return pieces.own_piece(x, dim, group, sizes)
    return apply(Split, x, dim, group, sizes)


@tells_failure
def all_to_all(x: Tensor, split_dim: int, concat_dim: int, group: Group = None) -> Tensor:
    """Send piece i of `x` along `split_dim` to rank i; join what came along `concat_dim`.

    Args:
        x: The same shape on every rank.
        split_dim: The dim to cut; the number of ranks divides it.
        concat_dim: The dim to join along; both may be negative.
        group: The ranks; the default group by default.

    Raises:
        InvalidArgumentError: No such dim, or `split_dim` does not divide.
    """
    if _stays(x, group):
        return pieces.swapped(x, split_dim, concat_dim, group)
    return apply(AllToAll, x, split_dim, concat_dim, group)
