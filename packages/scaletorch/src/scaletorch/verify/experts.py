"""Experts of the model that is verified: which part of a tensor a rank has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ..parallel.expert_parallel.building import find_expert_cuts
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.tensor_parallel import split_by_owner, take_own
from .compare import Shard
from .replicas import Owned


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
