"""All that can be wrong with a plan for a model, found before anything is changed or sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from ....dist.errors import InvalidArgumentError
from ..cuts.cut import Cut, share_cut
from ..cuts.fused import Fused, fuse
from ..regions.sum_grad import SumGradients, cannot_sum
from ..regions.surround import cannot_surround
from .families import find_family
from .heads import find_attentions
from .lengths import Length, check_lengths, find_lengths, local_attributes
from .plan import Divide, Match, Plan, find_mixins, match_plan
from .recognised import check_recognised
from .transformers_plan import find_own_plan


class Resolved(NamedTuple):
    """What a plan does to a model.

    Attributes:
        matches: The modules it speaks for.
        cuts: Module -> how its sharded size is cut, where that is not a share for each rank.
        attributes: Module -> attribute -> its value on each rank.
    """

    matches: list[Match]
    cuts: Mapping[nn.Module, Cut]
    attributes: Mapping[nn.Module, Mapping[str, tuple[int, ...]]]


def resolve_plan(model: nn.Module, plan: Plan | None, tp_size: int) -> list[Match]:
    """Find the modules that a plan, or else the model's family, speaks for and check each."""
    return resolve(model, plan, tp_size).matches


def resolve(model: nn.Module, plan: Plan | None, tp_size: int) -> Resolved:
    """Find what a plan, or else the model's own or its family's, does to it, and check that.

    Args:
        model: The whole model; it is not changed.
        plan: Pattern of module names -> style; None looks for a plan of the model's own
            (transformers), then for a known family.
        tp_size: Number of ranks it will be sharded over; none need exist.

    Raises:
        InvalidArgumentError: The plan does not match the model, a style does not fit its module,
            a size has no share for each rank, an attribute does not divide, a tied parameter
            would be sharded in two ways, or the model is not quite of its family.
    """
    heads: list[Length] = []
    named: set[nn.Module] = set()
    if plan is None:
        known = find_own_plan(model) or find_family(model)
        matches, heads = known.matches, check_recognised(model, known)
        named = {model.get_submodule(name) for name in known.heads}
    else:
        matches = match_plan(model, plan)
    _check_styles(matches)
    _check_mixins(matches)
    attentions = {a.module: a for a in find_attentions(model, matches, named)}
    lengths = find_lengths(model, matches, attentions, tp_size)
    if named - attentions.keys():
        lengths.divided.extend(heads)
    check_lengths(lengths, tp_size)
    cuts = {layer: cut for a in attentions.values() for layer, cut in a.cuts(tp_size).items()}
    cuts |= _fused_cuts((m for m in matches if m.module not in cuts), tp_size)
    _check_replicas(matches, cuts)
    _check_ties(model, matches, cuts, tp_size)
    return Resolved(matches, cuts, local_attributes(matches, attentions, tp_size))


def _fused_cuts(matches: Iterable[Match], tp_size: int) -> dict[nn.Module, Cut]:
    """Return how fused layers are cut that are not heads: each part into shares."""
    return {
        match.module: fuse([share_cut(n, tp_size) for n in match.lengths])
        for match in matches
        if isinstance(match.style, Fused)
    }


def _check_replicas(matches: Iterable[Match], cuts: Mapping[nn.Module, Cut]) -> None:
    """Refuse replicated heads in a layer that sums the ranks' parts: they would count twice."""
    for match in (m for m in matches if m.layer is not None and not m.layer.replicable):
        cut = cuts.get(match.module)
        short = [part for part in (cut.packed if cut else ()) if part.replicated]
        if short:
            most = min(len(part.parts) for part in short)
            raise InvalidArgumentError(
                f"tp = {len(short[0].ranks)} leaves ranks without a share of the heads of "
                f"{_place(match)}: a part of it has {most}, and is not replicated, since the "
                f"layer sums what ranks have; tp sizes up to {most} are legal"
            )


def _check_styles(matches: Sequence[Match]) -> None:
    """Check that each style fits its module."""
    for match in matches:
        if isinstance(match.style, Divide):
            _check_divide(match, match.style)
            continue
        reason = match.misfit()
        if reason is not None:
            raise InvalidArgumentError(f"{_place(match)} cannot be sharded: {reason}")


def _place(match: Match) -> str:
    return f"module '{match.name}' (pattern '{match.pattern}', style {match.style!r})"


def _check_mixins(matches: Sequence[Match]) -> None:
    mixins = find_mixins(matches)
    for match in (m for m in matches if m.module in mixins):
        mixin = mixins[match.module]
        reason = cannot_sum(match.module) if mixin is SumGradients else None
        reason = reason or cannot_surround(match.module, mixin)
        if reason is not None:
            raise InvalidArgumentError(f"{_place(match)} cannot be given that style: {reason}")


def _check_divide(match: Match, style: Divide) -> None:
    """Check the attributes a `Divide` names."""
    own = vars(match.module)
    integers = [name for name, value in own.items() if type(value) is int]
    found = [name for name in style.attributes if name in own]
    missing = [name for name in style.attributes if name not in own]
    wrong = [name for name in found if name not in integers]
    if wrong or (missing and not style.optional):
        raise InvalidArgumentError(
            f"{_place(match)} cannot divide {', '.join(wrong or missing)}: the integer attributes "
            f"that the module itself has are {integers}"
        )


def _check_ties(
    model: nn.Module, matches: Sequence[Match], cuts: Mapping[nn.Module, Cut], tp_size: int
) -> None:
    """Refuse a parameter that two modules share and the plan shards in two ways."""
    layers = {m.module: m.layer for m in matches if m.layer is not None}
    seen: dict[nn.Parameter, tuple[str, int | None, Cut | None]] = {}
    for module_name, module in model.named_modules():
        layer = layers.get(module)
        dims = {} if layer is None else layer.shard_dims
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full_name = f"{module_name}.{name}".lstrip(".")
            dim = dims.get(name)
            cut = None
            if dim is not None:
                cut = cuts.get(module) or share_cut(parameter.shape[dim], tp_size)
            other, other_dim, other_cut = seen.setdefault(parameter, (full_name, dim, cut))
            if (dim, cut) != (other_dim, other_cut):
                raise InvalidArgumentError(
                    f"'{other}' and '{full_name}' are one tied parameter, but the plan "
                    f"{_sharding(other_dim, other_cut)} the first and {_sharding(dim, cut)} the "
                    "second; give both modules styles that agree"
                )


def _sharding(dim: int | None, cut: Cut | None) -> str:
    sizes = "" if cut is None else f" into {', '.join(map(str, cut.sizes[:8]))}"
    return "replicates" if dim is None else f"shards along dim {dim}{sizes}"
