"""The modules of a model that are experts, by a plan as data or by the model's own plan."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ...dist.errors import InvalidArgumentError
from ..pg_manager.building import matching, no_match

Plan = Mapping[str, str]

EXPERTS = "experts"  # the only style

# The style of experts' parameters in plans of transformers, in every version since 5.0. The styles
# of their module and of routers differ between versions. Dense modules stay whole on every rank.
_STACKED = "grouped_gemm"


def named_experts(model: nn.Module, plan: Plan | None) -> dict[str, nn.Module]:
    """Return the modules that a plan names, by their first names, in the model's order."""
    modules = dict(model.named_modules(remove_duplicate=False))
    patterns = own_patterns(model) if plan is None else _patterns(plan)
    chosen: dict[nn.Module, str] = {}
    if plan is None and not patterns:
        chosen = {module: name for name, module in _recognised(model).items()}
    for pattern in patterns:
        names = matching(pattern, modules)
        if not names and plan is not None:
            raise InvalidArgumentError(no_match(pattern, modules))
        for name in names:
            chosen.setdefault(modules[name], name)
    if not chosen:
        raise InvalidArgumentError(
            f"{type(model).__name__} has no plan for experts (base_model_ep_plan of its config) "
            "and no module named experts: pass a plan with the names of modules that are called as "
            'experts(hidden, top_k_index, top_k_weights), such as {"**.mlp.experts": "experts"}'
        )
    return {chosen[module]: module for module in model.modules() if module in chosen}


def _recognised(model: nn.Module) -> dict[str, nn.Module]:
    """Return the innermost modules with parameters called `experts`, for a model without a plan."""
    named = ((n, m) for n, m in model.named_modules() if n.rpartition(".")[2] == EXPERTS)
    found = {n: m for n, m in named if next(m.parameters(), None) is not None}
    return {
        name: module
        for name, module in found.items()
        if not any(other.startswith(f"{name}.") for other in found)
    }


def own_patterns(model: nn.Module) -> list[str]:
    """Return the names of experts' modules in the plans of a model and of models inside it."""
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        plans = [getattr(module, "_ep_plan", None)]
        if getattr(module, "base_model", None) is module:
            plans.append(getattr(getattr(module, "config", None), "base_model_ep_plan", None))
        for plan in plans:
            for pattern, style in plan.items() if isinstance(plan, Mapping) else ():
                if style == _STACKED:  # of its stacked parameters
                    found.setdefault(f"{name}.{pattern.rpartition('.')[0]}".strip("."))
    return list(found)


def _patterns(plan: Plan) -> list[str]:
    for pattern, style in plan.items():
        if style != EXPERTS:
            raise InvalidArgumentError(
                f"the plan gives '{pattern}' the style {style!r}; the only style is {EXPERTS!r}"
            )
    return list(plan)
