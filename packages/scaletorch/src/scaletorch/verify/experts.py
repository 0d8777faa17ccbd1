"""Experts of the model that is verified: how many, and which part of a tensor a rank has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..dist.errors import InvalidArgumentError
from ..parallel.expert_parallel.building import find_expert_cuts, find_experts, named_experts
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.tensor_parallel import split_by_owner, take_own
from .compare import Shard
from .replicas import Owned


def count_experts(model: nn.Module, plan: Mapping[str, Any] | None = None) -> int:
    """Return over how many ranks a plain model's experts can be divided; 1 if it has none.

    Args:
        model: The plain module.
        plan: Of which the modules styled "experts" count; None is the model's own.

    Raises:
        InvalidArgumentError: The plan names modules that cannot be divided.
    """
    named = {pattern: style for pattern, style in (plan or {}).items() if style == "experts"}
    try:
        found = named_experts(model, named or None)
        return min(find_experts(name, module).experts for name, module in found.items())
    except InvalidArgumentError:
        if named:
            raise
        return 1


def own_part(model: nn.Module) -> Shard:
    """Return what takes this rank's part of one process's tensor, by its plain name."""
    cuts = find_expert_cuts(model)

    def take(name: str, whole: Tensor) -> Tensor:
        cut = cuts.get(name)
        own = take_own(model, name, whole)  # an expert may be cut over tp, too
        if cut is None or cut.dim is None:
            return own
        return own[cut.own.start : cut.own.stop]

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
