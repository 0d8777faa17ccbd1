"""What the layers of a pipeline cost, with experts or without: time of a token, or memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from ..dist import all_reduce
from ..dist.errors import InvalidArgumentError
from ..parallel.expert_parallel.building import find_experts, find_list, named_experts
from ..parallel.pg_manager import ProcessGroupManager
from ..parallel.pipeline_parallel import Split
from ..parallel.pipeline_parallel.building import parameter_costs, parts_of

_TOP_K = ("top_k", "num_experts_per_tok")  # attributes that say how many experts a token has


def active_costs(
    model: nn.Module,
    split: Split | None = None,
    plan: Mapping[str, Any] | None = None,
    *,
    top_k: int | None = None,
) -> tuple[float, ...]:
    """Count the parameters that a token meets in each layer, and before and after them.

    Of experts these are its top-k, not all; embeddings are looked up and count nothing. That is
    close to the time of layers, which a pipeline is balanced by, while `Split(costs="parameters")`
    counts all that a rank has, which balances memory.

    Args:
        model: The plain module, before anything is divided.
        split: Tells the layers; None infers them.
        plan: Names modules of experts as "experts"; None is the model's own.
        top_k: Experts of a token; None is what the model's attributes or config say.

    Returns:
        Numbers as `Split(costs=...)` takes them, the same on every rank.

    Raises:
        InvalidArgumentError: There are no experts, layers cannot be told, or nothing says `top_k`.

    Example:
        >>> parallelize(model, manager, split=Split(costs=active_costs(model)))
    """
    named = {pattern: style for pattern, style in (plan or {}).items() if style == "experts"}
    share: dict[nn.Parameter, Fraction] = {}  # exact: every rank finds the same sums
    for name, module in named_experts(model, named or None).items():
        number, meets_all = _number(name, module)
        chosen = _top_k(model, name) if top_k is None else top_k
        chosen = number if meets_all else chosen
        share |= dict.fromkeys(module.parameters(), Fraction(chosen, number))
    return tuple(
        float(sum(p.numel() * share.get(p, 1) for p in _computing(model, part)))
        for part in parts_of(model, split)
    )


def agreed_split(
    model: nn.Module, split: Split | None, manager: ProcessGroupManager
) -> Split | None:
    """Return a split by parameters as one by numbers: the most that any rank has of each part.

    Ranks may have unequal shares, as of three experts on two ranks. Each of them counting its own
    would cut the layers elsewhere.
    """
    if not isinstance(split, Split) or split.costs != "parameters" or manager.pp_size == 1:
        return split
    costs = parameter_costs(model, parts_of(model, split))
    most = torch.tensor(costs, dtype=torch.int64)
    all_reduce(most, "max", group=manager.world_group)
    return replace(split, costs=tuple(most.tolist()))


def _computing(model: nn.Module, part: tuple[str, ...]) -> set[nn.Parameter]:
    """Return the parameters of a part that tokens are multiplied by."""
    modules = {inner for name in part for inner in model.get_submodule(name).modules()}
    return {
        parameter
        for module in modules
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }


def _number(name: str, module: nn.Module) -> tuple[int, bool]:
    """Return how many experts a module has, and whether each token meets all of them."""
    if (listed := find_list(module)) is not None:  # cannot be divided, but called all the same
        return listed[1], False
    found = find_experts(name, module)
    return found.experts + found.beyond, found.way == "all"


def _top_k(model: nn.Module, name: str) -> int:
    """Return how many experts a token has, as the block around the experts says, or the config."""
    block = model.get_submodule(name.rpartition(".")[0])
    found = {
        value
        for module in block.modules()
        for attribute in _TOP_K
        if type(value := getattr(module, attribute, None)) is int
    }
    said: Any = getattr(getattr(model, "config", None), "num_experts_per_tok", None)
    found = found or ({said} if type(said) is int else set())
    if len(found) != 1:
        raise InvalidArgumentError(
            f"how many experts a token has in '{name}' is not to be seen in the block around it "
            f"({' or '.join(_TOP_K)}) nor in a config: pass top_k=..."
        )
    return found.pop()
