"""Plans as data: which modules are sharded in which style, and how names are matched."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...dist.errors import InvalidArgumentError
from .base import TensorParallelLayer
from .layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from .random import CommonRandom, ShardedRandom
from .sum_grad import SumGradients
from .surround import Surrounded


@dataclass(frozen=True, slots=True, init=False)
class Divide:
    """A style that divides integer attributes of a module by tp, such as its head counts.

    Args:
        attributes: Names of the module's own integer attributes.
        optional: Divide those the module has, instead of asking for all of them.

    Raises:
        InvalidArgumentError: No attribute is named.
    """

    attributes: tuple[str, ...]
    optional: bool

    def __init__(self, *attributes: str, optional: bool = False) -> None:
        if not attributes or not all(isinstance(name, str) for name in attributes):
            raise InvalidArgumentError(f"Divide takes attribute names, got {attributes}")
        object.__setattr__(self, "attributes", attributes)
        object.__setattr__(self, "optional", optional)


Style = str | Divide
Plan = Mapping[str, Style]

# Style -> the layer a plain module becomes and its options, or the mixin its class gets; None
# leaves the module as it is.
STYLES: Mapping[
    str, tuple[type[TensorParallelLayer], Mapping[str, Any]] | type[Surrounded] | None
] = {
    "column": (ColumnParallelLinear, {}),
    "column_gather": (ColumnParallelLinear, {"gather_output": True}),
    "row": (RowParallelLinear, {}),
    "vocab": (VocabParallelEmbedding, {}),
    "replicate": None,
    "replicate_sum_grad": SumGradients,
    "sharded": ShardedRandom,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A plan for every model whose modules have these names.

    Args:
        name: What messages call it.
        plan: Patterns and styles.
        may_lack: Patterns that need not match.
        complete: Patterns of modules in which every parameter must be the plan's: one that is
            not (a router) would get a part of its gradient only.
        heads: Pattern of a module -> its projections, whose outputs are cut at head borders.
            What sums gradients in it must be of the size of one head.
    """

    name: str
    plan: Plan
    may_lack: frozenset[str] = frozenset()
    complete: tuple[str, ...] = ()
    heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


FAMILIES: tuple[Family, ...] = (
    Family(
        name="Llama",
        plan={
            "**.embed_tokens": "vocab",
            "**.layers.*.self_attn": Divide(
                "num_heads", "num_kv_heads", "num_key_value_heads", optional=True
            ),
            "**.layers.*.self_attn.q_proj": "column",
            "**.layers.*.self_attn.k_proj": "column",
            "**.layers.*.self_attn.v_proj": "column",
            "**.layers.*.self_attn.o_proj": "row",
            "**.layers.*.self_attn.q_norm": "replicate_sum_grad",
            "**.layers.*.self_attn.k_norm": "replicate_sum_grad",
            "**.layers.*.mlp.gate_proj": "column",
            "**.layers.*.mlp.up_proj": "column",
            "**.layers.*.mlp.down_proj": "row",
            "**.lm_head": "column_gather",
        },
        may_lack=frozenset(
            {
                "**.embed_tokens",
                "**.layers.*.self_attn.q_norm",
                "**.layers.*.self_attn.k_norm",
                "**.lm_head",
            }
        ),
        complete=("**.layers.*.self_attn", "**.layers.*.mlp"),
        heads={"**.layers.*.self_attn": ("q_proj", "k_proj", "v_proj")},
    ),
)


@dataclass(frozen=True, slots=True)
class Match:
    """A module of the model, and the pattern of the plan that speaks for it."""

    name: str
    module: nn.Module
    pattern: str
    style: Style


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of dotted names.

    `*` and `?` stand for any text and one character inside one component, a component `**` for
    any number of components, none included; "" is the root module.
    """
    parts = pattern.split(".") if pattern else []
    wild = {"*": "[^.]*", "?": "[^.]"}
    return re.compile(
        "".join(
            r"(?:[^.]+\.)*"
            if part == "**"
            else "".join(wild.get(c, re.escape(c)) for c in part) + r"\."
            for part in parts
        )
    )


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that the pattern matches as a whole."""
    compiled = compile_pattern(pattern)
    return [name for name in names if compiled.fullmatch(f"{name}." if name else "")]


def match_plan(model: nn.Module, plan: Plan, may_lack: frozenset[str] = frozenset()) -> list[Match]:
    """Find the modules a plan speaks for, in the model's order.

    Raises:
        InvalidArgumentError: A style is unknown, a pattern matches no module, or two patterns
            match one module.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    matches: dict[nn.Module, Match] = {}
    for pattern, style in plan.items():
        _check_style(pattern, style)
        names = matching(pattern, modules)
        if not names and pattern not in may_lack:
            raise InvalidArgumentError(_no_match(pattern, modules))
        for name in names:
            module = modules[name]
            other = matches.setdefault(module, Match(name, module, pattern, style))
            if other.pattern != pattern:
                raise InvalidArgumentError(
                    f"two patterns of the plan match module '{name}': '{other.pattern}' "
                    f"({other.style}) and '{pattern}' ({style}); make them exclude each other"
                )
    return [matches[module] for module in model.modules() if module in matches]


def find_mixins(matches: Sequence[Match]) -> dict[nn.Module, type[Surrounded]]:
    """Return the mixins that modules of a matched plan get.

    A module named by `Divide` works on this rank's heads and draws as a sharded one does, unless
    it holds sharded layers deeper than its children: then it is a block or a whole model, that
    also works on whole activations. A replicated module inside a sharded one draws in common.
    """
    styles = {m.module: None if isinstance(m.style, Divide) else STYLES[m.style] for m in matches}
    layers = {module for module, style in styles.items() if isinstance(style, tuple)}
    mixins: dict[nn.Module, type[Surrounded]] = {}
    for match in matches:
        module, style = match.module, styles[match.module]
        if isinstance(style, type):
            mixins[module] = style
        elif isinstance(match.style, Divide):
            deeper = layers.intersection(module.modules()) - {*module.children()}
            mixins |= {} if deeper else {module: ShardedRandom}
    sharded = [module for module, mixin in mixins.items() if mixin is ShardedRandom]
    within = {inner for module in sharded for inner in module.modules()}
    common = (m.module for m in matches if m.style == "replicate" and m.module in within)
    return mixins | dict.fromkeys(common, CommonRandom)


def _check_style(pattern: str, style: Style) -> None:
    known = isinstance(style, Divide) or (isinstance(style, str) and style in STYLES)
    if not known:
        raise InvalidArgumentError(
            f"the plan gives '{pattern}' the unknown style {style!r}; expected one of "
            f"{', '.join(map(repr, STYLES))}, or Divide('attribute', ...)"
        )


def _no_match(pattern: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(pattern.replace("**.", ""), [n for n in names if n], n=3)
    hint = f"; nearest module names: {', '.join(close)}" if close else ""
    return f"pattern '{pattern}' of the plan matches no module{hint}"


def find_family(model: nn.Module) -> tuple[Family, list[Match]]:
    """Find the known family whose names the model has, and match its plan.

    Raises:
        InvalidArgumentError: No family is recognised.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    missing: list[str] = []
    for family in FAMILIES:
        absent = [p for p in family.plan if p not in family.may_lack and not matching(p, names)]
        if not absent:
            return family, match_plan(model, family.plan, family.may_lack)
        missing.append(f"{family.name} (nothing matches {', '.join(absent)})")
    raise InvalidArgumentError(
        f"{type(model).__name__} is of no known model family: {'; '.join(missing)}; "
        "pass plan={'pattern of module names': 'column' | 'row' | 'vocab' | ...}"
    )
