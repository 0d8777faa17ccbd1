"""Tensors that ranks hold: which part of the whole, and the same bits where several have it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..dist import all_gather_object
from ..parallel.expert_parallel.building import find_expert_cuts
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.tensor_parallel import split_by_owner, take_own
from .compare import INFINITE, Difference, Shard

# The first rank that holds a piece of a tensor, and the piece.
Owned = tuple[int, Tensor]


def missing(
    kind: str, step: int, held: Iterable[str], theirs: Iterable[str], bound: float
) -> Iterator[Difference]:
    """Report tensors of one process that are not among those held."""
    for name in sorted(set(theirs) - set(held)):
        yield Difference(f"{kind} {name}", step, INFINITE, bound, note="missing on this layout")


def doubled(
    stages: Iterable[Iterable[str]], tied: Iterable[str], bound: float
) -> Iterator[Difference]:
    """Report parameters that several stages hold without being tied: they would count twice."""
    stages = list(stages)
    for name in sorted({name for names in stages for name in names} - set(tied)):
        owners = [stage for stage, names in enumerate(stages) if name in names]
        if len(owners) > 1:
            note = f"held by stages {owners}, and not tied: it counts {len(owners)} times"
            yield Difference(f"parameter {name}", 0, INFINITE, bound, note=note)


def unlike(
    kind: str, step: int, tensors: Mapping[str, Iterable[Owned]], bound: float
) -> Iterator[Difference]:
    """Report tensors of which another rank that holds the same part has other bits.

    Args:
        kind: What they are.
        step: 0-based.
        tensors: Pieces of this rank's, by plain names.
        bound: What to report as the bound.
    """
    mine = {
        (name, number, owner): digest(piece)
        for name, pieces in tensors.items()
        for number, (owner, piece) in enumerate(pieces)
    }
    everyone = all_gather_object(mine)
    for part, bits in mine.items():
        others = [rank for rank, each in enumerate(everyone) if each.get(part, bits) != bits]
        if others:
            note = f"rank {others[0]} holds other bits of it: never synchronised"
            yield Difference(f"{kind} {part[0]}", step, INFINITE, bound, note=note)


def digest(tensor: Tensor) -> bytes:
    """Return 8 bytes that tell tensors of different bits apart."""
    flat = tensor.detach().cpu().flatten()
    content = bytearray(flat.numel() * flat.element_size())
    if content:
        torch.frombuffer(content, dtype=tensor.dtype).copy_(flat)
    return hashlib.blake2b(content, digest_size=8).digest()


def own_part(model: nn.Module) -> Shard:
    """Return what takes this rank's part of one process's tensor, by its plain name."""
    cuts = find_expert_cuts(model)

    def take(name: str, whole: Tensor) -> Tensor:
        cut = cuts.get(name)
        own = take_own(model, name, whole)  # an expert may be cut over tp, too
        return own if cut is None else own[cut.own.start : cut.own.stop]

    return take


def split_by_holder(
    model: nn.Module, tensors: Mapping[str, Tensor], manager: ProcessGroupManager
) -> dict[str, Sequence[Owned]]:
    """Return the pieces of this rank's tensors, each with a number of who else holds the same.

    It is the first tp rank that holds the piece; for experts, of those of the ep rank.
    """
    cuts = find_expert_cuts(model)
    pieces: dict[str, Sequence[Owned]] = dict(split_by_owner(model, tensors))
    first = manager.ep_rank * manager.tp_size
    return pieces | {
        name: tuple((first + owner, piece) for owner, piece in pieces[name])
        for name in tensors
        if name in cuts
    }
