"""Experts of a model: divided first, summed over the ranks that have the same, counted once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from ..dist.errors import InvalidArgumentError
from ..parallel.expert_parallel import apply_expert_parallel
from ..parallel.expert_parallel.building import (
    find_expert_cuts,
    find_experts,
    find_list,
    named_experts,
)
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.tensor_parallel import Stacked

EXPERTS = "experts"  # the style of a plan that means them
Plan = Mapping[str, Any] | None


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
        if any(map(find_list, found.values())):  # which one rank has as they are
            return 1
        return min(find_experts(name, module).experts for name, module in found.items())
    except InvalidArgumentError:
        if named:
            raise
        return 1


def split_plan(plan: Plan, manager: ProcessGroupManager) -> tuple[Plan, Plan]:
    """Return of a plan what names experts, and what names layers; None for what it lacks.

    Experts that are `Stacked` are both, if each of them is cut over tp (etp = tp). An empty plan
    stays one.
    """
    if plan is None:
        return None, None
    named = {p for p, style in plan.items() if style == EXPERTS or isinstance(style, Stacked)}
    experts = dict.fromkeys(sorted(named), EXPERTS) or None
    layers = {pattern: style for pattern, style in plan.items() if style != EXPERTS}
    if plan and not layers:
        return experts, None
    if manager.etp_size == 1 and not manager.grid.is_plain:
        layers = {p: style for p, style in layers.items() if not isinstance(style, Stacked)}
    return experts, layers


def divide_experts(
    model: nn.Module, manager: ProcessGroupManager, plan: Plan, *, shares_sequences: bool
) -> Plan:
    """Leave each rank its experts, in place, if the grid has a view of its own for them.

    Returns:
        What the plan says of layers.

    Raises:
        InvalidArgumentError: The model has no experts that can be divided so.
    """
    experts, layers = split_plan(plan, manager)
    if not manager.grid.is_plain:
        apply_expert_parallel(model, experts, manager.ep_group, sequence_parallel=shares_sequences)
    return layers


def expert_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters and buffers of which each rank has its experts'."""
    return frozenset(find_expert_cuts(model))


def expert_groups(model: nn.Module, manager: ProcessGroupManager) -> dict[str, ProcessGroup | None]:
    """Return the ranks over which the gradients of experts are summed, by parameters' names."""
    names = expert_names(model) & {name for name, _ in model.named_parameters()}
    return dict.fromkeys(sorted(names), manager.edp_group if names else None)
