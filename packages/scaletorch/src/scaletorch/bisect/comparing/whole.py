"""The whole of a tensor, put together of ranks' parts; the part of it that a rank should have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .places import Held, Way, index


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank has of a tensor.

    Attributes:
        rank: Global rank.
        micro_batch: 0-based.
        tensor: The piece.
        index: For each of its dims which indices of the whole it holds, int64 [size].
    """

    rank: int
    micro_batch: int
    tensor: Tensor
    index: tuple[Tensor, ...]


def pieces_of(held: Sequence[Held], ways: Sequence[Way], *, weighed: bool = False) -> list[Piece]:
    """Return what ranks have, with its place; without the padding."""
    found = []
    for each in held:
        tensor, places = each.tensor, []
        if weighed and (weight := each.recording.header["weight"]) not in (None, 1):
            tensor = tensor * weight
        for dim, way in enumerate(ways):
            place = index(each, dim, way)
            if bool((place >= way.total).any()):
                real = (place < way.total).nonzero().flatten()
                tensor, place = tensor.index_select(dim, real), place[real]
            places.append(place)
        found.append(Piece(each.recording.rank, each.micro_batch, tensor, tuple(places)))
    return found


def assemble(pieces: Sequence[Piece], ways: Sequence[Way], *, sums: bool = False) -> Tensor:
    """Return the whole, in float64 if it is of numbers that round; NaN where no rank has it."""
    shape = [way.total for way in ways]
    first = pieces[0].tensor
    dtype = torch.float64 if first.is_floating_point() else first.dtype
    if len(pieces) == 1 and list(first.shape) == shape and not sums:
        return first.to(dtype)
    whole = torch.zeros(shape, dtype=dtype)
    if dtype.is_floating_point and not sums:
        whole.fill_(torch.nan)
    for piece in pieces:
        grid = _grid(piece)
        if sums:
            whole.index_put_(grid, piece.tensor.to(dtype), accumulate=True) if grid else whole.add_(
                piece.tensor
            )
        elif grid:
            whole[grid] = piece.tensor.to(dtype)
        else:
            whole.copy_(piece.tensor)
    return whole


def part_of(whole: Tensor, piece: Piece) -> Tensor:
    """Return what a piece should be."""
    grid = _grid(piece)
    return whole[grid] if grid else whole


def _grid(piece: Piece) -> tuple[Tensor, ...]:
    dims = len(piece.index)
    return tuple(
        place.view([-1 if dim == own else 1 for dim in range(dims)])
        for own, place in enumerate(piece.index)
    )
