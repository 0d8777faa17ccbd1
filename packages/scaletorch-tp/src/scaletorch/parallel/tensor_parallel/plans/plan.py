"""Plans as data: which modules are sharded in which style, and how names are matched."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ....dist.errors import InvalidArgumentError
from ..cuts.fused import Fused
from ..layers.base import TensorParallelLayer
from ..layers.conv1d import ColumnParallelConv1D, RowParallelConv1D
from ..layers.embedding import ScaledVocabParallelEmbedding, VocabParallelEmbedding
from ..layers.linear import ColumnParallelLinear, RowParallelLinear
from ..regions.random import CommonRandom, ShardedRandom
from ..regions.sequence import JoinSequence
from ..regions.sum_grad import SumGradients
from ..regions.surround import Surrounded


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


Style = str | Divide | Fused
Plan = Mapping[str, Style]

# Style -> the layer a plain module becomes and its options, or the mixin its class gets; None
# leaves the module as it is.
STYLES: Mapping[
    str, tuple[type[TensorParallelLayer], Mapping[str, Any]] | type[Surrounded] | None
] = {
    "column": (ColumnParallelLinear, {"async_all_reduce": True}),
    "column_gather": (ColumnParallelLinear, {"async_all_reduce": True, "gather_output": True}),
    "row": (RowParallelLinear, {}),
    "row_split": (RowParallelLinear, {"input_is_parallel": False}),
    "vocab": (VocabParallelEmbedding, {}),
    "replicate": None,
    "sequence": None,  # what sequence parallelism makes of every module it is not told about
    "sequence_join": JoinSequence,
    "replicate_sum_grad": SumGradients,
    "sharded": ShardedRandom,
}

# A style's layer -> those it stands for where the plain module is of another class than torch's.
VARIANTS: Mapping[type[TensorParallelLayer], tuple[type[TensorParallelLayer], ...]] = {
    ColumnParallelLinear: (ColumnParallelConv1D,),
    RowParallelLinear: (RowParallelConv1D,),
    VocabParallelEmbedding: (ScaledVocabParallelEmbedding,),
}


@dataclass(frozen=True, slots=True)
class Match:
    """A module of the model, and the pattern of the plan that speaks for it."""

    name: str
    module: nn.Module
    pattern: str
    style: Style

    @property
    def layer(self) -> type[TensorParallelLayer] | None:
        """What the module becomes; None where it stays of its class."""
        style = _named_style(self.style)
        if not isinstance(style, tuple):
            return None
        variants = VARIANTS.get(style[0], ())
        return next((layer for layer in variants if layer.takes(self.module)), style[0])

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of that layer."""
        style = _named_style(self.style)
        return style[1] if isinstance(style, tuple) else {}

    @property
    def mixin(self) -> type[Surrounded] | None:
        """What comes before the module's class by its style alone."""
        style = _named_style(self.style)
        return style if isinstance(style, type) else None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each part that is divided over the ranks: one, but of a fused layer more."""
        if self.layer is None:
            return ()
        length = int(getattr(self.module, self.layer.sharded_size))
        return self.style.lengths(length) if isinstance(self.style, Fused) else (length,)

    def misfit(self) -> str | None:
        """Say why the module cannot become its layer; None where it can, or becomes none."""
        layer = self.layer
        reason = None if layer is None else layer.misfit(self.module)
        if layer is None or reason or not isinstance(self.style, Fused):
            return reason
        return self.style.misfit(int(getattr(self.module, layer.sharded_size)))


def _named_style(
    style: Style,
) -> tuple[type[TensorParallelLayer], Mapping[str, Any]] | type[Surrounded] | None:
    if isinstance(style, Divide):
        return None
    return STYLES[style.style if isinstance(style, Fused) else style]


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
    layers = {match.module for match in matches if match.layer is not None}
    mixins: dict[nn.Module, type[Surrounded]] = {}
    for match in matches:
        module = match.module
        if match.mixin is not None:
            mixins[module] = match.mixin
        elif isinstance(match.style, Divide):
            deeper = layers.intersection(module.modules()) - {*module.children()}
            mixins |= {} if deeper else {module: ShardedRandom}
    sharded = [module for module, mixin in mixins.items() if mixin is ShardedRandom]
    within = {inner for module in sharded for inner in module.modules()}
    common = (m.module for m in matches if m.style == "replicate" and m.module in within)
    return mixins | dict.fromkeys(common, CommonRandom)


def _check_style(pattern: str, style: Style) -> None:
    known = isinstance(style, Divide | Fused) or (isinstance(style, str) and style in STYLES)
    if not known:
        raise InvalidArgumentError(
            f"the plan gives '{pattern}' the unknown style {style!r}; expected one of "
            f"{', '.join(map(repr, STYLES))}, Divide('attribute', ...) or Fused('column', parts)"
        )


def _no_match(pattern: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(pattern.replace("**.", ""), [n for n in names if n], n=3)
    hint = f"; nearest module names: {', '.join(close)}" if close else ""
    return f"pattern '{pattern}' of the plan matches no module{hint}"
