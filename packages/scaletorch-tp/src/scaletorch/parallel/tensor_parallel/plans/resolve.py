"""Resolve a plan for a model: find its changes and check them, also on sequence shards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from torch import nn

from ....dist.errors import InvalidArgumentError
from ...placement import Boundary, Invariant, ModelView, ends, modules_within
from ..layers.base import TensorParallelLayer
from ..layers.linear import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from ..layers.multihead import ParallelMultiheadAttention
from ..layers.own_parameters import Bounded, HeadParameters
from ..regions.region import Region
from ..regions.surround import cannot_surround
from ..sharing.sequence import SequenceLayer
from ..styles import Divide
from .attention import (
    check_lengths,
    check_ties,
    find_attentions,
    find_lengths,
    find_whole,
    local_attributes,
    with_cuts,
)
from .own_plans import find_own_plan
from .plan import SEQUENCE_WHOLE, Match, Matches, Plan, look_up, match_plan, with_mixins

_ATTENTION = (HeadParameters, ParallelMultiheadAttention)

_UNPLANNED = """\
{} has no plan of its own for its layers (_tp_plan of transformers), and a forward of a few ids \
suggests none; pass plan=suggest_plan(model, example) of scaletorch.parallel.tensor_parallel, \
which finds one by a forward of what the model takes, or write one, such as \
{{"layers.*.up": "column", "layers.*.down": "row"}}, or leave tp_size at 1 and use the other axes"""


class UnplannedError(InvalidArgumentError):
    """The caller passed no plan, and the model has no plan of its own."""


class Resolved(NamedTuple):
    """The changes that a plan makes to a model."""

    view: ModelView
    matches: Matches  # in the model's order
    attributes: Mapping[nn.Module, Mapping[str, tuple[int, ...]]]  # of each module, on each rank
    regions: list[nn.Module]  # modules whose column-parallel layers share one input
    layers: list[nn.Module]  # modules that get shards of sequences under sequence parallelism
    whole: list[nn.Module]  # modules in them that get full ones


def resolve(
    model: nn.Module,
    plan: Plan | None,
    tp_size: int,
    *,
    sequence_parallel: bool = False,
    divided: Collection[nn.Module] = (),
) -> Resolved:
    """Find and check the changes that a plan makes to a model, which is not changed.

    Without a plan it takes the model's own, without modules in `divided` (by another strategy).
    """
    view = ModelView(model)
    found, heads = _match(view, plan, divided)
    matches = {match.module: match for match in with_mixins(found)}
    _check_styles(matches.values(), divided)
    named = {*heads.values()}
    attentions = find_attentions(view, matches, named)
    attributes, counted = local_attributes(matches.values(), attentions, tp_size)
    divided_lengths, shared = find_lengths(view, matches, attentions, heads, tp_size)
    check_lengths([*counted, *divided_lengths], shared, tp_size)
    matches = with_cuts(matches, attentions, tp_size)
    check_ties(view, matches)
    starts = (m for m in view.names if _is_region(m, matches, closed=m not in named))
    regions = [module for module in starts if cannot_surround(module, Region) is None]
    layers: list[nn.Module] = []
    whole: list[nn.Module] = []
    if sequence_parallel:
        layers = [m.module for m in matches.values() if m.style == "sequence_layer"]
        layers = layers or _find_layers(view.model, matches)
        styled = [m.module for m in matches.values() if _sees_whole_sequences(m)]
        regions = [module for module in regions if module not in {*layers, *styled}]
        earlier = [module for module in view.names if isinstance(module, Region)]
        gathers = [m.module for m in matches.values() if m.becomes(ParallelMultiheadAttention)]
        found_whole = find_whole(view, [*regions, *earlier, *styled, *gathers])
        inside = modules_within(layers)
        whole = [module for module in (*styled, *found_whole) if module in inside]
        on_shards = inside - modules_within([*regions, *whole])
        _check_sequences(view, matches.values(), inside - modules_within(styled), on_shards)
        for module in (*layers, *whole):
            reason = cannot_surround(module, SequenceLayer)
            if reason is not None:
                raise InvalidArgumentError(
                    f"'{view.names[module]}' ({type(module).__name__}) cannot be sequence "
                    f"parallel: {reason}"
                )
        splits = [m for m in matches.values() if m.style == "row_split" and m.module in on_shards]
        for m in splits if plan is None else ():  # would add up outputs of different tokens
            matches[m.module] = look_up(m.name, m.module, m.pattern, "replicate")
    return Resolved(view, matches, attributes, regions, layers, whole)


def _match(
    view: ModelView, plan: Plan | None, divided: Collection[nn.Module]
) -> tuple[list[Match], dict[str, nn.Module]]:
    """Return the matches of the plan, and the modules known to be attention by name."""
    if plan is not None:
        return match_plan(view.model, plan), {}
    known = find_own_plan(view.model, divided)
    if known is None:
        raise UnplannedError(_UNPLANNED.format(type(view.model).__name__))
    return known


def _sees_whole_sequences(match: Match) -> bool:
    """Return whether a module gets full sequences under sequence parallelism, by its style."""
    style = match.style
    if not isinstance(style, Boundary):
        return style == SEQUENCE_WHOLE
    inputs = style.inputs.values() if isinstance(style.inputs, Mapping) else [style.inputs]
    outside = {ends(side)[0] for side in inputs}
    outside |= set() if style.outputs is None else {ends(style.outputs)[1]}
    is_layer = match.layer is not None and match.layer is not Bounded
    return style.converts and not is_layer and outside == {Invariant()}


def _is_region(module: nn.Module, matches: Matches, *, closed: bool) -> bool:
    """Return whether a module starts with column-parallel layers, and ends with a row-parallel one.

    Its other children have no parameters of the hidden size, as a norm of hidden states has.
    """
    columns = rows = 0
    names = ("in_features", "out_features")
    hidden = {getattr(child, name, None) for child in module.children() for name in names}
    for child in module.children():
        found: list[type[nn.Module]] = [type(child)]  # it may be a parallel layer already
        if child in matches:
            kinds = matches[child].layer, matches[child].mixin
            found += [kind for kind in kinds if kind is not None]
        if any(issubclass(kind, ColumnParallelLinear) for kind in found):
            columns += 1
        elif any(issubclass(kind, RowParallelLinear) for kind in found):
            rows += 1
        elif any(issubclass(kind, _ATTENTION) for kind in found):
            return False  # it contains attention, so it is a block
        elif any(issubclass(kind, TensorParallelLayer) for kind in found):
            continue
        elif any(hidden.intersection(p.shape) for p in child.parameters()):
            return False
    return columns > 0 and rows in ((1,) if closed else (0, 1))


def _check_styles(matches: Iterable[Match], divided: Collection[nn.Module]) -> None:
    """Refuse a style that does not fit its module."""
    for match in matches:
        if match.layer is not None and match.module in divided:
            raise InvalidArgumentError(
                f"{match.place} is divided over these ranks already, by expert parallelism: leave "
                "it out of the plan, or give the grid etp_size = tp_size to divide it both ways"
            )
        if isinstance(match.style, Divide):
            integers = [n for n, value in vars(match.module).items() if type(value) is int]
            wrong = [name for name in match.style.attributes if name not in integers]
            if wrong:
                raise InvalidArgumentError(
                    f"{match.place} cannot divide {', '.join(wrong)}: the integer attributes that "
                    f"the module itself has are {integers}"
                )
        elif match.misfit is not None:
            raise InvalidArgumentError(f"{match.place} cannot be sharded: {match.misfit}")
        reason = None if match.mixin is None else cannot_surround(match.module, match.mixin)
        if reason is not None:
            raise InvalidArgumentError(f"{match.place} cannot be given that style: {reason}")


def _find_layers(model: nn.Module, matches: Matches) -> list[nn.Module]:
    """Return the children of a model's outermost lists, from the first to the last with shards.

    A model of transformers has them in its decoder, beside which may be a tower for images.
    """
    get_decoder = getattr(model, "get_decoder", None)
    for root in (get_decoder() if callable(get_decoder) else None, model):
        layers = _layers_in(root, matches) if isinstance(root, nn.Module) else []
        if layers:
            return layers
    raise InvalidArgumentError(
        f"{type(model).__name__} has no list of modules (nn.ModuleList, nn.Sequential) with "
        "sharded layers inside, in which sequence parallelism would divide sequences: give its "
        "layers the style 'sequence_layer', or do without sequence parallelism"
    )


def _layers_in(root: nn.Module, matches: Matches) -> list[nn.Module]:
    sharded = {match.module for match in matches.values() if match.layer is not None}
    layers: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in root.modules():
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = [*module.children()]
        holders = [
            at
            for at, child in enumerate(children)
            if not isinstance(child, nn.ModuleList | nn.ModuleDict)  # is never called
            and not sharded.isdisjoint({*child.modules()} - {child})
            and not _is_region(child, matches, closed=True)
        ]
        if holders:
            layers += children[holders[0] : holders[-1] + 1]
            inside |= modules_within(layers)
    return layers


def _check_sequences(
    view: ModelView,
    matches: Iterable[Match],
    shared: Collection[nn.Module],
    on_shards: Collection[nn.Module],
) -> None:
    """Refuse what would be wrong in layers (`shared`), or in them where nothing is gathered."""
    for match in (match for match in matches if match.module in shared):
        reason = None
        usual = match.layer is not None and not {"arrives", "returns"} & {*match.options}
        converts = isinstance(match.style, Boundary) and match.style.converts
        if converts and not usual:
            reason = (
                "divides sequences itself by the conversions at its boundary, as sequence "
                "parallelism would: let it take and return Invariant() tensors"
            )
        elif match.becomes(VocabParallelEmbedding) or (
            match.becomes(Bounded)
            and isinstance(match.module, nn.Embedding)
            and match.module in on_shards
        ):
            reason = (
                "would be given other tokens on each rank, and each has a part of its table: give "
                "it the style 'replicate'"
            )
        elif match.becomes(ParallelMultiheadAttention) and not vars(match.module)["batch_first"]:
            reason = (
                "takes sequences as [L, B, E], of which sequence parallelism would divide the "
                "batch; build it with batch_first=True"
            )
        if reason is not None:
            raise InvalidArgumentError(
                f"{match.place} {reason}, or do without sequence parallelism"
            )
    for module, name in view.names.items():
        if getattr(module, "layerdrop", 0):
            raise InvalidArgumentError(
                f"'{name}' leaves out layers at random (layerdrop), and with sequence parallelism "
                "each rank draws for itself; set its layerdrop to 0, or do without"
            )
