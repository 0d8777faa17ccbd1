"""The experts of a model: the modules that a plan names, their stacks, and how many each has."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ...dist.errors import InvalidArgumentError
from ..pg_manager.building import matching, no_match

Plan = Mapping[str, str]

EXPERTS = "experts"  # the only style

# The style of experts' parameters in plans of transformers, in every version since 5.0. The styles
# of their module and of routers differ between versions. Dense modules stay whole on every rank.
_STACKED = "grouped_gemm"


def named_experts(model: nn.Module, plan: Plan | None) -> dict[str, nn.Module]:
    """Return the modules that a plan names, by their first names, in the model's order."""
    for pattern, style in () if plan is None else plan.items():
        if style != EXPERTS:
            raise InvalidArgumentError(
                f"the plan gives '{pattern}' the style {style!r}; the only style is {EXPERTS!r}"
            )
    modules = dict(model.named_modules(remove_duplicate=False))
    patterns = own_patterns(model) if plan is None else [*plan]
    chosen = _recognised(model) if plan is None and not patterns else {}
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


def _recognised(model: nn.Module) -> dict[nn.Module, str]:
    """Return the innermost modules with parameters called `experts`, for a model without a plan."""
    named = {m: n for n, m in model.named_modules() if n.rpartition(".")[2] == EXPERTS}
    found = {m: n for m, n in named.items() if any(True for _ in m.parameters())}
    outer = {n for n in found.values() if any(x.startswith(f"{n}.") for x in found.values())}
    return {m: n for m, n in found.items() if n not in outer}


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


_LISTS = nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict
_NOT_A_NUMBER_OF_EXPERTS = ("per_", "top", "shared")  # in names such as num_experts_per_tok


@dataclass(frozen=True, slots=True)
class ModuleExperts:
    """The experts of one module."""

    name: str  # the module's first name in the model
    module: nn.Module
    experts: int
    stacked: tuple[str, ...]  # parameters with a row for each expert along dim 0
    buffers: tuple[str, ...]  # buffers with a row for each expert
    numbers: tuple[tuple[nn.Module, str], ...]  # owners and names of attributes with the number


def find_experts(name: str, module: nn.Module) -> ModuleExperts:
    """Return the experts of a module, or refuse one that cannot be divided."""
    _check_lists(name, module)
    _check_call(name, module)
    tensors = dict(named_tensors(module))
    experts = _count(name, module, tensors)
    rows = [inner for inner, each in tensors.items() if each.dim() and len(each) == experts]
    stacked = tuple(inner for inner in rows if isinstance(tensors[inner], nn.Parameter))
    buffers = tuple(inner for inner in rows if inner not in stacked)
    if not stacked:
        raise InvalidArgumentError(
            f"'{name}' has {experts} experts, but no parameter with as many rows along dim 0: "
            f"{_shapes(tensors)}"
        )
    numbers = tuple(place for place, value in _numbers_of(module) if value == experts)
    return ModuleExperts(name, module, experts, stacked, buffers, numbers)


def find_list(module: nn.Module) -> tuple[str, int] | None:
    """Return the name and length of the list or dict that holds a module's experts, or None.

    It is a module without a forward, or a list inside as long as the number of experts.
    """
    bare = isinstance(module, _LISTS) and not _has_forward(module)
    numbers = {number for _, number in _numbers_of(module)}
    numbers = numbers or {len(each) for _, each in named_tensors(module) if each.dim() > 2}
    for inner, each in module.named_modules():
        fits = isinstance(each, _LISTS) and (bare or not numbers or len(each) in numbers)
        if fits and any(True for _ in each.parameters()):
            return inner, len(each)
    return None


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward  # torch's own raises


def _check_lists(name: str, module: nn.Module) -> None:
    found = find_list(module)
    if found is not None:
        inner, experts = found
        place = ".".join(filter(None, (name, inner)))
        raise InvalidArgumentError(
            f"the experts of '{name}' are in a list ('{place}', a "
            f"{type(module.get_submodule(inner)).__name__}), and experts in a list are not "
            f"divided: stack them in parameters [{experts}, ...], one for each weight, in a module "
            'called as experts(hidden, top_k_index, top_k_weights), as "Experts in a list" in '
            "docs/expert_parallel.md shows; with ep_size=1, and etp_size not given, they train as "
            "they are"
        )


def _check_call(name: str, module: nn.Module) -> None:
    kind = type(module).__name__
    if not _has_forward(module):
        raise InvalidArgumentError(
            f"'{name}' is a {kind} without a forward of its own: move the computation of experts "
            "into a module that is called as experts(hidden, top_k_index, top_k_weights), and "
            "name that module"
        )
    if "forward" in vars(module):
        raise InvalidArgumentError(
            f"the forward of '{name}' was replaced on the instance: divide the experts first"
        )
    signature = inspect.signature(module.forward)
    try:
        signature.bind(None, None, None)
    except TypeError:
        raise InvalidArgumentError(
            f"'{name}' ({kind}) is called as {kind}{signature}, not as experts(hidden, "
            "top_k_index, top_k_weights): its routing is decided elsewhere, so tokens cannot be "
            "sent to its experts; with ep_size=1, and etp_size not given, they train as they are"
        ) from None


def _count(name: str, module: nn.Module, tensors: Mapping[str, Tensor]) -> int:
    """Return the number of a module's experts."""
    rows = {len(each) for each in tensors.values() if each.dim()}
    numbers = {number for _, number in _numbers_of(module)}
    found = numbers & rows
    if not numbers:  # without an attribute, the stacks of matrices give the number
        found = {len(each) for each in tensors.values() if each.dim() > 2}
    if len(found) != 1:
        raise InvalidArgumentError(
            f"the number of experts of '{name}' ({type(module).__name__}) is "
            f"{'one of ' + str(sorted(found)) if found else 'unknown'}: an attribute such as "
            "num_experts must give it, and parameters must have as many rows along dim 0; it has "
            f"{_shapes(tensors)}"
        )
    return found.pop()


def _numbers_of(module: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], int]]:
    """Yield attributes that may hold the number of experts, of the module and its submodules."""
    for each in module.modules():
        for attribute, value in vars(each).items():
            excluded = any(word in attribute for word in _NOT_A_NUMBER_OF_EXPERTS)
            if type(value) is int and "experts" in attribute and not excluded:
                yield (each, attribute), value


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{n} {tuple(t.shape)}" for n, t in tensors.items()) or "no parameters"


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by all of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
