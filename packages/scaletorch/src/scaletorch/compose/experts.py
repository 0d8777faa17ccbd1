"""Divide a model's experts over ranks, and find the groups that sum their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from ..dist.errors import InvalidArgumentError
from ..parallel.expert_parallel import apply_expert_parallel
from ..parallel.expert_parallel.building import (
    DividedExperts,
    find_expert_cuts,
    find_experts,
    find_list,
    named_experts,
    share_tokens,
)
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.tensor_parallel import Stacked
from ..parallel.tensor_parallel.building import WholeSequence, find_cuts

EXPERTS = "experts"  # the style of expert modules in a plan
Plan = Mapping[str, Any] | None


def count_experts(model: nn.Module, plan: Mapping[str, Any] | None = None) -> int:
    """Return the largest number of ranks that can share a model's experts; 1 if it has none.

    A plan's modules of style "experts" count; without a plan, the model's own experts.
    """
    named = {pattern: style for pattern, style in (plan or {}).items() if style == "experts"}
    try:
        found = named_experts(model, named or None)
        if any(map(find_list, found.values())):  # a plain list of experts stays on one rank
            return 1
        return min(find_experts(name, module).experts for name, module in found.items())
    except InvalidArgumentError:
        if named:
            raise
        return 1


def _split_plan(plan: Plan, manager: ProcessGroupManager) -> tuple[Plan, Plan]:
    """Split a plan into experts and layers, or None; `Stacked` experts that tp cuts are in both."""
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
    """Keep only this rank's experts, in place; return the plan of the other layers."""
    experts, layers = _split_plan(plan, manager)
    if not manager.grid.is_plain:
        apply_expert_parallel(model, experts, manager.ep_group, sequence_parallel=shares_sequences)
    return layers


def expert_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters and buffers that belong to divided experts."""
    return frozenset(find_expert_cuts(model))


def expert_groups(model: nn.Module, manager: ProcessGroupManager) -> dict[str, ProcessGroup | None]:
    """Return the groups over which experts' gradients are summed, by parameter name."""
    names = expert_names(model) & {name for name, _ in model.named_parameters()}
    return dict.fromkeys(sorted(names), manager.edp_group if names else None)


def settle_tokens(model: nn.Module, manager: ProcessGroupManager) -> None:
    """Divide experts' tokens over tp ranks in blocks that see whole sequences.

    In other blocks each tp rank has its own tokens, and experts must be cut over tp if etp = tp.
    """
    wholes = (each for each in model.modules() if isinstance(each, WholeSequence))
    inside = {each for whole in wholes for each in whole.modules()}
    cuts = find_cuts(model)
    for name, each in model.named_modules():
        if not isinstance(each, DividedExperts):
            continue
        if each in inside:
            if manager.etp_size == 1:
                share_tokens(each, manager.tp_group)
            continue
        if manager.etp_size == 1:
            continue
        if not any(parameter.startswith(f"{name}.") for parameter in cuts):
            raise InvalidArgumentError(
                f"the experts '{name}' are not cut over tp, and with sequence parallelism each tp "
                "rank has tokens of its own: take etp = 1, or do without sequence parallelism"
            )
