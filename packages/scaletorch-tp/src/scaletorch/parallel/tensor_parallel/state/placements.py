"""Placements of parameters, in DTensor's terms if possible, and the owner of each piece."""

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
    """A placement that DTensor lacks: packed, replicated or unevenly divided shards.

    Args:
        dim: The shard dim.
        ranks: For each rank, the index ranges of the full tensor along `dim` that it holds, in the
            order of its shard.
    """

    dim: int
    ranks: tuple[tuple[range, ...], ...]


def placements(model: nn.Module) -> dict[str, Shard | Replicate | Pieces]:
    """Return parameter name -> its placement on the tensor-parallel axis, the same on every rank.

    `Shard(dim)` is used if the division is DTensor's: shards of ceil(length / tp), of which the
    last may be shorter. `Pieces` is used for packed projections, for heads that several ranks hold,
    and for other divisions (10 over 4 ranks is 3 3 2 2 here, but 3 3 3 1 in DTensor). All other
    parameters are `Replicate()`.

    Args:
        model: A model with tensor-parallel layers. Every name of a tied parameter is listed.
    """
    cuts = find_cuts(model)
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return {name: place(cuts.get(name)) for name in names}


def place(cut: ParameterCut | None) -> Shard | Replicate | Pieces:
    """Return the placement of a parameter with this cut, `Replicate()` for None."""
    from torch.distributed.tensor import Replicate, Shard  # a slow import

    if cut is None or cut.layer.tp_size == 1:
        return Replicate()
    size = cut.layer.tp_size
    known = cut.cut.ranges == _chunks(cut.cut.whole, size)
    return Shard(cut.dim) if known else Pieces(cut.dim, cut.cut.ranges)


def _chunks(length: int, size: int) -> tuple[tuple[range, ...], ...]:
    """Return the index ranges that DTensor gives each rank of a length."""
    share = -(-length // size)
    starts = [min(share * rank, length) for rank in range(size + 1)]
    return tuple((range(*pair),) for pair in pairwise(starts))


def split_by_owner(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Owned, ...]]:
    """Split this rank's tensors into pieces, each with its owner: the first tp rank that holds it.

    The owner is 0 for replicated tensors, and this rank for a piece that no other rank holds. A
    shard is one piece, or one for each packed part of a fused weight, some of which may be
    replicated. If each piece is counted only on its owner, each element is counted once.

    Args:
        model: A model with tensor-parallel layers.
        tensors: Name of a parameter (or buffer) -> this rank's shard, or its gradient or similar.

    Returns:
        Name -> (owner, piece) pairs, in order; pieces are views of the tensors.

    Raises:
        InvalidArgumentError: A name is not the model's, or a tensor has not its shard's shape.
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
