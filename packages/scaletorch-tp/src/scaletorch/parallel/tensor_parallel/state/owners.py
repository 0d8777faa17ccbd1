"""Which rank counts what, where several ranks hold the same."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from .whole import ParameterCut, check_shards, find_cuts

# The first rank that holds a piece of a shard, and the piece.
Owned = tuple[int, Tensor]


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
    packed, rank = cut.layer.cut.packed, cut.layer.tp_rank
    pieces = tensor.split([part.sizes[rank] for part in packed], cut.dim)
    owners = (part.owners[part.ranks[rank]] for part in packed)
    return tuple(zip(owners, pieces, strict=True))
