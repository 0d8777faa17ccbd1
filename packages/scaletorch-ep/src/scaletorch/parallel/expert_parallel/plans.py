"""The modules of a model that are experts, by a plan as data or by the model's own plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from ...dist.errors import InvalidArgumentError
from ..pg_manager.building import matching, no_match

Plan = Mapping[str, str]

EXPERTS = "experts"  # the only style

# The style of experts' parameters in plans of transformers, in every version since 5.0. The styles
# of their module and of routers differ between versions. Dense modules stay whole on every rank.
_STACKED = "grouped_gemm"


def named_experts(model: nn.Module, plan: Plan | None) -> dict[str, nn.Module]:
    """Return the modules that a plan names, by their first names, in the model's order.

    Raises:
        InvalidArgumentError: A style is unknown, a pattern matches nothing, or there is no plan.
    """
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
            f"{type(model).__name__} brings no plan for experts (base_model_ep_plan of its config) "
            "and calls no module experts: pass one that names the modules called as "
            'experts(hidden, top_k_index, top_k_weights), such as {"**.mlp.experts": "experts"}'
        )
    return {chosen[module]: module for module in model.modules() if module in chosen}


def _recognised(model: nn.Module) -> dict[str, nn.Module]:
    """Return the experts of a model without any plan: modules with parameters called `experts`.

    Of nested ones the innermost.
    """
    found = {name: module for name, module in model.named_modules() if _is_named(name, module)}
    return {
        name: module
        for name, module in found.items()
        if not any(other.startswith(f"{name}.") for other in found)
    }


def _is_named(name: str, module: nn.Module) -> bool:
    return name.rpartition(".")[2] == EXPERTS and any(True for _ in module.parameters())


def own_patterns(model: nn.Module) -> list[str]:
    """Return the names of experts' modules in the plans of a model and of models inside it.

    They are the modules whose parameters have the style of stacked experts.
    """
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        for plan in _plans(module):
            for pattern, style in plan.items():
                if style == _STACKED:
                    found.setdefault(f"{name}.{pattern.rpartition('.')[0]}".strip("."))
    return list(found)


def _plans(module: nn.Module) -> Iterator[Mapping[str, str]]:
    """Yield a module's own plans: of the instance, and of the config of a base model."""
    plan = getattr(module, "_ep_plan", None)
    if isinstance(plan, Mapping):
        yield plan
    if getattr(module, "base_model", None) is module:
        config = getattr(getattr(module, "config", None), "base_model_ep_plan", None)
        if isinstance(config, Mapping):
            yield config


def _patterns(plan: Plan) -> list[str]:
    for pattern, style in plan.items():
        if style != EXPERTS:
            raise InvalidArgumentError(
                f"the plan gives '{pattern}' the style {style!r}; there is one, {EXPERTS!r}"
            )
    return list(plan)
