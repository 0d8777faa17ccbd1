"""Plans as data: the style of each module, and the matching of names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ....dist.errors import InvalidArgumentError
from ...pg_manager.building import matching, no_match
from ...placement import Cut, modules_within
from ..layers.base import TensorParallelLayer
from ..layers.linear import (
    ColumnParallelConv1D,
    ColumnParallelEmbedding,
    ColumnParallelLinear,
    RowParallelConv1D,
    RowParallelLinear,
    ScaledVocabParallelEmbedding,
    VocabParallelEmbedding,
)
from ..layers.multihead import ParallelMultiheadAttention
from ..layers.own_parameters import HeadParameters, ParallelExperts
from ..regions.random import CommonRandom, ShardedRandom
from ..regions.replicas import TailShared
from ..regions.surround import Surrounded
from ..sharing.sequence import SequenceLayer
from ..styles import Divide, Fused, PerHead, SharedTail, Stacked

Style = str | Divide | Fused | PerHead | SharedTail | Stacked
Plan = Mapping[str, Style]

SEQUENCE_WHOLE = "sequence_whole"

# Style -> the layer that a plain module becomes and its options, or the mixin added to its class;
# None leaves the module as it is.
STYLES: Mapping[
    str, tuple[type[TensorParallelLayer], Mapping[str, Any]] | type[Surrounded] | None
] = {
    "column": (ColumnParallelLinear, {"async_all_reduce": True}),
    "column_gather": (ColumnParallelLinear, {"async_all_reduce": True, "gather_output": True}),
    "column_embedding": (ColumnParallelEmbedding, {}),
    "row": (RowParallelLinear, {}),
    "row_split": (RowParallelLinear, {"input_is_parallel": False}),
    "vocab": (VocabParallelEmbedding, {}),
    "attention": (ParallelMultiheadAttention, {}),
    "replicate": None,
    "sequence_layer": SequenceLayer,
    SEQUENCE_WHOLE: None,  # with sequence parallelism it becomes a `WholeSequence`
    "sharded": ShardedRandom,
}

# A style's layer -> its variants for plain modules of other classes than torch's.
VARIANTS: Mapping[type[TensorParallelLayer], tuple[type[TensorParallelLayer], ...]] = {
    ColumnParallelLinear: (ColumnParallelConv1D,),
    RowParallelLinear: (RowParallelConv1D,),
    VocabParallelEmbedding: (ScaledVocabParallelEmbedding,),
}


@dataclass(frozen=True, slots=True)
class Match:
    """A module of the model with its style, layer and options in the plan."""

    name: str  # the module's first one
    module: nn.Module
    pattern: str
    style: Style
    layer: type[TensorParallelLayer] | None = None  # the class that the module becomes
    options: Mapping[str, Any] = field(default_factory=dict)  # of the layer or the mixin
    mixin: type[Surrounded] | None = None  # the class put before the module's own one
    lengths: tuple[int, ...] = ()  # divided over the ranks, one for each packed projection
    misfit: str | None = None  # why the module cannot become that layer
    cut: Cut | None = None  # of all lengths, after `resolve`

    @property
    def place(self) -> str:
        """The description of the module in messages."""
        return f"module '{self.name}' (pattern '{self.pattern}', style {self.style!r})"

    @property
    def is_column(self) -> bool:
        """True if it becomes a column-parallel layer whose output is a shard."""
        return self.becomes(ColumnParallelLinear) and not self.options.get("gather_output")

    @property
    def is_row(self) -> bool:
        """True if it becomes a row-parallel layer whose input is a shard."""
        takes_shards = bool(self.options.get("input_is_parallel", True))
        return self.becomes(RowParallelLinear) and takes_shards

    @property
    def dims(self) -> Mapping[str, int]:
        """The shard dim of each of its own parameters; others are replicated."""
        if isinstance(self.style, PerHead | Stacked):
            return self.style.dims
        return {} if self.layer is None else self.layer.shard_dims

    def cut_of(self, name: str) -> Cut | None:
        """Return the cut of its parameter `name`; None if it is replicated or not yet known."""
        if self.cut is None or self.layer is None or name not in self.dims:
            return None
        if isinstance(self.style, PerHead | Stacked):
            return self.style.cut_of(name, self.cut)
        return self.layer.cut_of_parts(self.cut, name)

    def becomes(self, layer: type[TensorParallelLayer]) -> bool:
        """Return whether the module becomes this layer or a variant of it."""
        return self.layer is not None and issubclass(self.layer, layer)


Matches = Mapping[nn.Module, Match]


def look_up(name: str, module: nn.Module, pattern: str, style: Style) -> Match:
    """Return the match of a module: the layer, options and mixin of its style, which is known."""
    match = partial(Match, name, module, pattern, style)
    if isinstance(style, Divide):
        return match()
    if isinstance(style, SharedTail):
        options = {"shared_features": style.features}
        return match(options=options, mixin=TailShared, misfit=style.misfit(module))
    if isinstance(style, PerHead | Stacked):
        of_heads = isinstance(style, PerHead)
        kind, mixin = (HeadParameters, ShardedRandom) if of_heads else (ParallelExperts, None)
        misfit = style.misfit(module) or kind.misfit(module)
        lengths = () if misfit else (style.length(module),)
        return match(kind, {"own_style": style}, mixin, lengths, misfit)
    meaning = STYLES[style.style if isinstance(style, Fused) else style]
    if not isinstance(meaning, tuple):
        return match(mixin=meaning)
    wanted, settings = meaning
    layer = next((variant for variant in VARIANTS.get(wanted, ()) if variant.takes(module)), wanted)
    misfit = layer.misfit(module) or _of_multihead(module)
    length = 0 if misfit else int(getattr(module, layer.sharded_size))
    parts: tuple[int, ...] = (length,)
    if isinstance(style, Fused):
        misfit, parts = misfit or style.misfit(length), style.lengths(length)
    return match(layer, settings, None, () if misfit else parts, misfit)


def _of_multihead(module: nn.Module) -> str | None:
    """Return why the out_proj of torch's attention cannot be sharded alone, or None."""
    if type(module) is not NonDynamicallyQuantizableLinear:
        return None
    return (
        "it is the out_proj of an nn.MultiheadAttention, which reads its weight itself: give that "
        "module the style 'attention', which is for both"
    )


def with_outputs(matches: Mapping[nn.Module, Match]) -> dict[nn.Module, Match]:
    """Return the matches plus a "row" match for the out_proj of each `nn.MultiheadAttention`."""
    found = dict(matches)
    for match in matches.values():
        if match.becomes(ParallelMultiheadAttention) and match.misfit is None:
            module = match.module.get_submodule("out_proj")
            name, misfit = f"{match.name}.out_proj".lstrip("."), RowParallelLinear.misfit(module)
            lengths = () if misfit else (int(module.in_features),)  # type: ignore[arg-type]
            found[module] = Match(
                name, module, match.pattern, "row", RowParallelLinear, {}, None, lengths, misfit
            )
    return found


def children_of(module: nn.Module, matches: Matches) -> list[Match]:
    """Return the matches of a module's children that become sharded layers."""
    matched = (matches[child] for child in module.children() if child in matches)
    return [match for match in matched if match.layer is not None]


def match_plan(model: nn.Module, plan: Plan) -> list[Match]:
    """Return the matches of the modules that a plan names, in the model's order."""
    modules = dict(model.named_modules(remove_duplicate=False))
    matches: dict[nn.Module, Match] = {}
    for pattern, style in plan.items():
        known = isinstance(style, Divide | Fused | PerHead | SharedTail | Stacked)
        if not known and not (isinstance(style, str) and style in STYLES):
            raise InvalidArgumentError(
                f"the plan gives '{pattern}' the unknown style {style!r}; expected one of "
                f"{', '.join(map(repr, STYLES))}, Divide('attribute', ...), "
                "Fused('column', parts), PerHead('parameter', ...), SharedTail(features) or "
                "Stacked({'parameter': dim})"
            )
        names = matching(pattern, modules)
        if not names:
            raise InvalidArgumentError(no_match(pattern, modules))
        for name in names:
            module = modules[name]
            other = matches.setdefault(module, look_up(name, module, pattern, style))
            if other.pattern != pattern:
                raise InvalidArgumentError(
                    f"two patterns of the plan match module '{name}': '{other.pattern}' "
                    f"({other.style}) and '{pattern}' ({style}); make them exclude each other"
                )
    matches = with_outputs(matches)
    return [matches[module] for module in model.modules() if module in matches]


def with_mixins(matches: Sequence[Match]) -> list[Match]:
    """Return the matches with the mixins that follow from the positions of modules.

    A module with `Divide` works on this rank's heads and draws its own random numbers, unless
    sharded layers lie deeper than its children, as in a block or model. A replicated module inside
    it draws the same random numbers on all ranks.
    """
    layers = {match.module for match in matches if match.layer is not None}
    mixins = {match.module: match.mixin for match in matches if match.mixin is not None}
    for match in (m for m in matches if isinstance(m.style, Divide)):
        if not layers.intersection(match.module.modules()) - {*match.module.children()}:
            mixins[match.module] = ShardedRandom
    sharded = [module for module, mixin in mixins.items() if mixin is ShardedRandom]
    within = modules_within(sharded)
    common = (m.module for m in matches if m.style == "replicate" and m.module in within)
    mixins |= dict.fromkeys(common, CommonRandom)
    return [replace(match, mixin=mixins.get(match.module)) for match in matches]
