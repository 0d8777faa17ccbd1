"""Placements of parameters in torch's terms, if it has any, and the first owner of each piece."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import Tensor, nn

from .whole import ParameterCut, check_shards, find_cuts

if TYPE_CHECKING:
    from torch.distributed.tensor import Replicate, Shard

# The first rank that holds a piece of a shard, and the piece.
Owned = tuple[int, Tensor]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A placement that torch has no word for: shards of several pieces, shared, or cut elsewhere.

    Args:
        dim: The dim that is cut.
        ranks: For each rank which indices of the whole it holds along `dim`, in their order there.
    """

    dim: int
    ranks: tuple[tuple[range, ...], ...]


def placements(model: nn.Module) -> dict[str, Shard | Replicate | Pieces]:
    """Return parameter name -> how it lies over the tensor-parallel axis, on every rank the same.

    `Replicate()` is what every rank has the whole of, `Shard(dim)` what is cut as DTensor cuts:
    in shares of ceil(length / tp), of which the last may be shorter. `Pieces` is the rest: packed
    parts, heads that several ranks hold, and lengths whose shares are not DTensor's (10 over 4
    ranks is 3 3 2 2 here, and 3 3 3 1 there).

    Args:
        model: A model with tensor-parallel layers. Every name of a tied parameter is listed.
    """
    cuts = find_cuts(model)
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return {name: place(cuts.get(name)) for name in names}


def place(cut: ParameterCut | None) -> Shard | Replicate | Pieces:
    """Return the placement of what is cut so, or not at all."""
    from torch.distributed.tensor import Replicate, Shard  # a slow import

    if cut is None or cut.layer.tp_size == 1:
        return Replicate()
    size = cut.layer.tp_size
    known = cut.cut.ranges == _chunks(cut.cut.whole, size)
    return Shard(cut.dim) if known else Pieces(cut.dim, cut.cut.ranges)


def _chunks(length: int, size: int) -> tuple[tuple[range, ...], ...]:
    """Return the indices that DTensor gives each rank of a length."""
    share = -(-length // size)
    starts = [min(share * rank, length) for rank in range(size + 1)]
    return tuple((range(*pair),) for pair in pairwise(starts))


def split_by_owner(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Owned, ...]]:
    """Cut this rank's tensors into pieces, each with the first tp rank that holds the same piece.

    That rank is 0 for what every rank has the whole of and this rank for what no other has. A
    shard is one piece, or one for each part of a fused weight, of which some may be replicated.
    Count a piece on its owner, and each element of the model is counted once.

    Args:
        model: A model with tensor-parallel layers.
        tensors: Name of a parameter (or buffer) -> this rank's shard of it, of its gradient or
            the like.

    Returns:
        The same names with pieces that are views of the tensors, in their order.

    Raises:
        InvalidArgumentError: A name is not the model's, or a tensor is not of its shard's shape.
    """
    check_shards(model, tensors)
    cuts = find_cuts(model)
    return {name: _split(tensor, cuts.get(name)) for name, tensor in tensors.items()}


def _split(tensor: Tensor, cut: ParameterCut | None) -> tuple[Owned, ...]:
    if cut is None or cut.layer.tp_size == 1:
        return ((0, tensor),)
    rank = cut.layer.tp_rank
    pieces = tensor.split([*map(len, cut.cut.ranges[rank])], cut.dim)
    return tuple(zip(cut.cut.owners(rank), pieces, strict=True))
