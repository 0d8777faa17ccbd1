"""Experts of a model: divided first, summed over the ranks that have the same, counted once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from ..dist.errors import InvalidArgumentError
from ..parallel.expert_parallel import apply_expert_parallel
from ..parallel.expert_parallel.building import find_expert_cuts
from ..parallel.pg_manager import ProcessGroupManager

EXPERTS = "experts"  # the style of a plan that means them
Plan = Mapping[str, Any] | None


def split_plan(plan: Plan) -> tuple[Plan, Plan]:
    """Return of one plan what names experts, and what names layers; None for what it lacks."""
    if plan is None:
        return None, None
    experts = {pattern: style for pattern, style in plan.items() if style == EXPERTS}
    layers = {pattern: style for pattern, style in plan.items() if style != EXPERTS}
    return experts or None, layers if layers or not experts else None


def divide_experts(
    model: nn.Module, manager: ProcessGroupManager, plan: Plan, *, shares_sequences: bool
) -> None:
    """Leave each rank its experts, in place, if the grid has ranks for them.

    Raises:
        InvalidArgumentError: The model has none that can be divided so.
    """
    if manager.ep_size == 1:
        return
    if manager.etp_size > 1:
        raise InvalidArgumentError(
            f"the grid {manager.grid} divides each expert over etp = {manager.etp_size} ranks, "
            "which parallelize does not do yet: leave etp_size out"
        )
    apply_expert_parallel(model, plan, manager.ep_group, sequence_parallel=shares_sequences)


def expert_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters and buffers of which each rank has its experts'."""
    return frozenset(find_expert_cuts(model))


def expert_groups(model: nn.Module, manager: ProcessGroupManager) -> dict[str, ProcessGroup | None]:
    """Return the ranks over which the gradients of experts are summed, by parameters' names."""
    names = expert_names(model) & {name for name, _ in model.named_parameters()}
    return dict.fromkeys(sorted(names), manager.edp_group if names else None)
