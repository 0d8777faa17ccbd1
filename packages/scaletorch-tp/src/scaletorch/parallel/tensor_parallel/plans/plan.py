"""Plans as data: the style of each module, and the matching of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ....dist.errors import InvalidArgumentError
from ...pg_manager.building import matching, no_match
from ...placement import (
    Boundary,
    Cut,
    Invariant,
    Partial,
    Replicate,
    Shard,
    Varying,
    ends,
    modules_within,
)
from ..layers.base import TensorParallelLayer
from ..layers.linear import (
    ColumnParallelConv1D,
    ColumnParallelLinear,
    RowParallelConv1D,
    RowParallelLinear,
    ScaledVocabParallelEmbedding,
    VocabParallelEmbedding,
)
from ..layers.multihead import ParallelMultiheadAttention
from ..layers.own_parameters import AtBoundary, Bounded, HeadParameters, ParallelExperts
from ..regions.random import CommonRandom, ShardedRandom
from ..regions.region import TailShared
from ..regions.surround import Surrounded
from ..styles import (
    Divide,
    Fused,
    PerHead,
    SharedTail,
    Sliced,
    Stacked,
    misfit_at,
    unknown_parameters,
)

Style = str | Boundary | Divide | Fused | PerHead | SharedTail | Stacked
Plan = Mapping[str, Style]

SEQUENCE_WHOLE = "sequence_whole"

_ENTERED = Invariant(), Replicate()
_SUMMED = Partial(), Invariant()
_COLUMNS = {"weight": Shard(0), "bias": Shard(0)}
_EXPERTS = Boundary(_ENTERED, _SUMMED)

# Style -> the boundary of its module, if the plain module is torch's.
STYLES: Mapping[str, Boundary] = {
    "column": Boundary(_ENTERED, Shard(-1), _COLUMNS),
    "column_gather": Boundary(_ENTERED, (Shard(-1), Invariant()), _COLUMNS),
    "column_embedding": Boundary(Invariant(), Shard(-1), {"weight": Shard(1)}),
    "row": Boundary(Shard(-1), _SUMMED, {"weight": Shard(1)}),
    "row_split": Boundary((Invariant(), Shard(-1)), _SUMMED, {"weight": Shard(1)}),
    "vocab": Boundary(Invariant(), _SUMMED, {"weight": Shard(0)}),
    "attention": Boundary(
        _ENTERED, _SUMMED, {"in_proj_weight": Shard(0), "in_proj_bias": Shard(0)}
    ),
    "replicate": Boundary(),
    "sequence_layer": Boundary(Shard(1), Shard(1)),
    SEQUENCE_WHOLE: Boundary((Shard(1), Invariant()), (Invariant(), Shard(1))),
    "sharded": Boundary(Varying(), Varying()),
}

# Style -> the layer that a plain module becomes: of torch's class, or of another one.
_LAYERS: Mapping[str, tuple[type[TensorParallelLayer], ...]] = {
    "column": (ColumnParallelLinear, ColumnParallelConv1D),
    "column_gather": (ColumnParallelLinear, ColumnParallelConv1D),
    "row": (RowParallelLinear, RowParallelConv1D),
    "row_split": (RowParallelLinear, RowParallelConv1D),
    "vocab": (VocabParallelEmbedding, ScaledVocabParallelEmbedding),
    "attention": (ParallelMultiheadAttention,),
}
# Style -> the mixin added to the module's class.
_MIXINS: Mapping[str, type[Surrounded]] = {
    "sharded": ShardedRandom,
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
        style = "a Boundary" if isinstance(self.style, Boundary) else f"style {self.style!r}"
        return f"module '{self.name}' (pattern '{self.pattern}', {style})"

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
        own: Sliced | None = self.options.get("own_style")
        if own is not None:
            return own.dims
        return {} if self.layer is None else self.layer.shard_dims

    def cut_of(self, name: str) -> Cut | None:
        """Return the cut of its parameter `name`; None if it is replicated or not yet known."""
        if self.cut is None or self.layer is None or name not in self.dims:
            return None
        own: Sliced | None = self.options.get("own_style")
        return own.cut_of(name, self.cut) if own else self.layer.cut_of_packed(self.cut, name)

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
        options: dict[str, Any] = {"shared_features": style.features}
        return match(None, options, TailShared, (), style.misfit(module))
    if isinstance(style, PerHead):
        misfit = style.misfit(module) or HeadParameters.misfit(module)
        rows = Boundary(parameters=dict.fromkeys(style.names, Shard(0)))
        own = None if misfit else Sliced.at(rows, module)
        lengths = () if own is None else (own.length(module),)
        return match(HeadParameters, {"own_style": own}, ShardedRandom, lengths, misfit)
    if isinstance(style, Stacked):
        misfit = style.misfit(module) or ParallelExperts.misfit(module)
        lengths = () if misfit else (style.length(module),)
        options = {"own_style": style, **AtBoundary.settings(_EXPERTS, name)}
        return match(ParallelExperts, options, None, lengths, misfit)
    if isinstance(style, Boundary):
        return _at_boundary(match, name, module, style)
    named = style.style if isinstance(style, Fused) else style
    if named == "column_embedding":
        if type(module) is not nn.Embedding:
            return match(misfit=f"it is a {type(module).__name__}, not an Embedding itself")
        return _at_boundary(match, name, module, STYLES[named])
    if named not in _LAYERS:
        return match(mixin=_MIXINS.get(named))
    layers, boundary = _LAYERS[named], STYLES[named]
    layer = next((layer for layer in layers if layer.takes(module)), layers[0])
    found = _as_layer(match, module, layer, boundary, boundary)
    if found.misfit is None and isinstance(style, Fused):
        [length] = found.lengths
        found = replace(found, misfit=style.misfit(length), lengths=style.lengths(length))
    return found


def _as_layer(
    match: Callable[..., Match],
    module: nn.Module,
    layer: type[TensorParallelLayer],
    boundary: Boundary,
    usual: Boundary,
) -> Match:
    """Return the match of a module that becomes a layer, whose usual boundary is `usual`."""
    named = boundary.inputs
    inputs = next(iter(named.values()), Invariant()) if isinstance(named, Mapping) else named
    (arrives, needed), (computed, returns) = ends(inputs), ends(boundary.outputs or Varying())
    columns, rows = "gather_output" in layer.options, "input_is_parallel" in layer.options
    inside = ends(usual.inputs)[1], ends(usual.outputs)[0]  # type: ignore[arg-type]
    fits = (needed, computed) == inside
    if not (columns or rows or layer.plain_class is nn.Embedding):
        fits = (inputs, boundary.outputs) == (usual.inputs, usual.outputs)
    misfit = layer.misfit(module)
    if misfit is None and type(module) is NonDynamicallyQuantizableLinear:
        misfit = (
            "it is the out_proj of an nn.MultiheadAttention, which reads its weight itself: give "
            "that module the style 'attention', which is for both"
        )
    elif misfit is None and not fits:
        misfit = (
            f"with its parameters so sharded on tp it computes {inside[1]} from {inside[0]}, and "
            f"its boundary says {boundary.outputs} from {boundary.inputs}"
        )
    elif misfit is None and returns == Partial() and module._parameters.get("bias") is not None:
        misfit = "every rank would add its bias to a Partial() output; let it return the sum"
    options: dict[str, Any] = {}
    if columns:
        options = {"async_all_reduce": arrives == Invariant(), "gather_output": returns != computed}
    elif rows:
        options = {"input_is_parallel": arrives == needed}
    if arrives != Invariant() and not options.get("input_is_parallel"):
        options["arrives"] = arrives
    if returns != Invariant() and not (columns and returns == computed):
        options["returns"] = returns
    lengths = () if misfit else (int(getattr(module, layer.sharded_size)),)
    return match(layer, options, None, lengths, misfit)


def _at_boundary(
    match: Callable[..., Match], name: str, module: nn.Module, boundary: Boundary
) -> Match:
    """Return the match of a module with a boundary of its own."""
    settings = AtBoundary.settings(boundary, name)
    misfit = unknown_parameters(module, boundary)
    if misfit is not None:
        return match(misfit=misfit)
    own, known = Sliced.at(boundary, module), []
    held = [name for name, parameter in module._parameters.items() if parameter is not None]
    for style, layers in _LAYERS.items() if own.dims else ():
        for layer in (layer for layer in layers if layer.misfit(module) is None):
            known.append({n: d for n, d in layer.shard_dims.items() if n in held})
            if known[-1] == own.dims:
                return _as_layer(match, module, layer, boundary, STYLES[style])
    if known and not isinstance(module, nn.Embedding):
        return match(misfit=f"it can be sharded along {known}, and its boundary says {own.dims}")
    if not own.dims:
        return match(mixin=AtBoundary, options=settings, misfit=misfit_at(boundary, module))
    misfit = misfit_at(boundary, module) or Bounded.misfit(module)
    return match(Bounded, {"own_style": own, **settings}, None, (own.length(module),), misfit)


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
        of_torch = any(kind.__name__ == "ParallelStyle" for kind in type(style).__mro__)
        known = style in STYLES if isinstance(style, str) else isinstance(style, Style)
        if not (known or of_torch):
            classes = ", ".join(kind.__name__ for kind in get_args(Style)[1:])
            raise InvalidArgumentError(
                f"the plan gives '{pattern}' the unknown style {style!r}; expected one of "
                f"{', '.join(map(repr, STYLES))}, or an object of the styles {classes}"
            )
        names = matching(pattern, modules)
        if not names:
            raise InvalidArgumentError(no_match(pattern, modules))
        for name in names:
            module = modules[name]
            own = Boundary.from_torch(style, module) if of_torch else style
            other = matches.setdefault(module, look_up(name, module, pattern, own))
            if other.pattern != pattern:
                raise InvalidArgumentError(
                    f"two patterns of the plan match module '{name}': '{other.pattern}' "
                    f"({other.style}) and '{pattern}' ({style}); make them exclude each other"
                )
    matches = with_outputs(matches)
    return [matches[module] for module in model.modules() if module in matches]


def with_mixins(matches: Sequence[Match]) -> list[Match]:
    """Return the matches with the mixins that follow from the positions of modules.

    A module with `Divide` draws its own random numbers, unless sharded layers lie deeper than its
    children, as in a block. A replicated module inside it draws the same ones on all ranks.
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
