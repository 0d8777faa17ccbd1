"""Resolve a plan for a model: find its changes and check them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from ....dist.errors import InvalidArgumentError
from ...placement import Cut, ModelView, fuse, share_cut
from ..layers.base import TensorParallelLayer
from ..layers.linear import ColumnParallelLinear, RowParallelLinear
from ..layers.multihead import ParallelMultiheadAttention
from ..layers.own_parameters import HeadParameters
from ..regions.region import Region
from ..regions.surround import cannot_surround
from ..styles import Divide, Placed
from .attention import Attention, find_attentions, find_whole, has_heads
from .own_plans import find_own_plan
from .plan import SEQUENCE_WHOLE, Match, Matches, Plan, children_of, match_plan, with_mixins
from .sequences import check_in_attention, check_sequences, kept_whole_on_shares, layers_that_share

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
    whole: list[nn.Module]  # modules that get full sequences under sequence parallelism


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
    found, heads = _match(view, plan, divided, sequence_parallel=sequence_parallel)
    matches = {match.module: match for match in with_mixins(found)}
    _check_styles(matches.values(), divided)
    named = {*heads.values()}
    attentions = find_attentions(view, matches, named)
    attributes, counted = local_attributes(matches.values(), attentions, tp_size)
    divided_lengths, shared = find_lengths(view, matches, attentions, heads, tp_size)
    check_lengths([*counted, *divided_lengths], shared, tp_size)
    _check_heads(matches, attentions)
    matches = with_cuts(matches, attentions, tp_size)
    check_ties(view, matches)
    if sequence_parallel:
        check_sequences(view, list(matches.values()))
    starts = (m for m in view.names if _is_region(m, matches, ends=m not in named))
    regions = [module for module in starts if cannot_surround(module, Region) is None]
    whole: list[nn.Module] = []
    if sequence_parallel:
        earlier = [module for module in view.names if isinstance(module, Region)]
        styled = [m.module for m in matches.values() if m.style == SEQUENCE_WHOLE]
        gathers = [m.module for m in matches.values() if m.becomes(ParallelMultiheadAttention)]
        whole = [*styled, *find_whole(view, [*regions, *earlier, *styled, *gathers])]
        replaced = next((module for module in whole if "forward" in vars(module)), None)
        if replaced is not None:
            raise InvalidArgumentError(
                f"with sequence parallelism '{view.names[replaced]}' ({type(replaced).__name__}) "
                "needs full sequences, but its forward was replaced on the instance: apply tensor "
                "parallelism before that, or do without sequence parallelism"
            )
        check_in_attention(matches.values(), regions, whole)
        if plan is None:
            matches = kept_whole_on_shares(model, matches, [*regions, *whole])
    return Resolved(view, matches, attributes, regions, whole)


def _match(
    view: ModelView, plan: Plan | None, divided: Collection[nn.Module], *, sequence_parallel: bool
) -> tuple[list[Match], dict[str, nn.Module]]:
    """Return the matches of the plan, and the modules known to be attention by name."""
    model = view.model
    if plan is not None:
        return match_plan(model, plan), {}
    known = find_own_plan(model, divided)
    if known is None:
        raise UnplannedError(_UNPLANNED.format(type(model).__name__))
    modules = dict(model.named_modules(remove_duplicate=False))
    found, heads = known
    left = [match for match in found if match.module not in divided]
    if sequence_parallel:
        left += layers_that_share(view, left)
    return left, {name: modules[name] for name in heads}


def _is_region(module: nn.Module, matches: Matches, *, ends: bool) -> bool:
    """Return whether a module starts with column-parallel and `ends` with one row-parallel layer.

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
    return columns > 0 and rows in ((1,) if ends else (0, 1))


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


def _check_heads(matches: Matches, attentions: Mapping[nn.Module, Attention]) -> None:
    """Refuse to shard per-head parameters if the head layout is unknown."""
    for match in matches.values():
        if not match.becomes(HeadParameters):
            continue
        attention = attentions.get(match.module)
        columns = [m.lengths for m in children_of(match.module, matches) if m.is_column]
        if attention is None and columns and {*columns} == {match.lengths}:
            continue  # an MLP with one element for each feature
        [count] = match.lengths
        if attention is None or count % attention.query:
            found = "an unknown number of" if attention is None else str(attention.query)
            raise InvalidArgumentError(
                f"{match.place} cannot be sharded: its parameters have {count} elements for query "
                f"heads, and its projections have {found} heads; shard the projections by heads too"
            )


# A size that is divided over the ranks: its description and its length.
Length = tuple[str, int]
Attentions = Mapping[nn.Module, Attention]


def find_lengths(
    view: ModelView,
    matches: Matches,
    attentions: Attentions,
    named: Mapping[str, nn.Module],
    tp_size: int,
) -> tuple[list[Length], list[Length]]:
    """Return the lengths that tp must divide, and the lengths that must be at least tp."""
    by_heads = {layer for a in attentions.values() for layer in (*a.lengths, *a.per_head)}
    # Layers with heads of unknown length: an uneven division might split a head.
    attending = [module for module in view.names if has_heads(module)]
    children = [match for module in attending for match in children_of(module, matches)]
    whole = {m.module for m in children if m.is_column or m.is_row} - by_heads
    divided: list[Length] = []
    shared = [(f"query heads of {a.name}", a.query) for a in attentions.values()]
    for match in matches.values():
        if match.module in by_heads:
            continue
        own = match.options.get("own_style")
        if isinstance(own, Placed):
            lengths = own.lengths.items()
            divided += [(f"{match.name}.{n}".lstrip("."), length) for n, length in lengths]
        elif match.layer is not None:
            where = f"{match.name}.{match.layer.sharded_size}".lstrip(".")
            kind = divided if match.module in whole else shared
            kind.extend((where, length) for length in match.lengths)
    unknown = [name for name, module in named.items() if module not in attentions]
    for name in unknown if tp_size > 1 else ():
        raise InvalidArgumentError(
            f"the features of the projections of '{name}' are not understood as heads: expected a "
            "head_dim, or a number of heads, on the module or its config, and query heads that are "
            "a multiple of key/value heads; pass a plan of your own"
        )
    return divided, shared


def check_lengths(divided: Sequence[Length], shared: Sequence[Length], tp_size: int) -> None:
    """Refuse a tp size that does not fit the lengths, and name sizes that do."""
    uneven = [f"{where} = {length}" for where, length in divided if length % tp_size]
    short = [f"{where} = {length}" for where, length in shared if length < tp_size]
    problems = [f"does not divide {_some(uneven)}"] if uneven else []
    problems += [f"leaves ranks without a share of {_some(short)}"] if short else []
    if not problems:
        return
    most = min(length for _, length in [*shared, *divided])
    common = math.gcd(*(length for _, length in divided))
    legal = f"tp sizes up to {most} are legal"
    if common:  # the nearest divisor on each side of tp
        divisors = [n for n in range(1, most + 1) if common % n == 0]
        below, above = [d for d in divisors if d < tp_size], [d for d in divisors if d > tp_size]
        nearest = map(str, [*below[-1:], *above[:1]])
        legal = f"the nearest legal tp sizes are {' and '.join(nearest)}"
    raise InvalidArgumentError(
        f"tp = {tp_size} {' and '.join(problems)}; for this model and plan {legal}"
    )


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


def with_cuts(matches: Matches, attentions: Attentions, tp_size: int) -> dict[nn.Module, Match]:
    """Return the matches with their cuts: at head boundaries, or as even as possible."""
    cuts = {layer: cut for a in attentions.values() for layer, cut in a.cuts(tp_size).items()}
    result = dict(matches)
    for match in (m for m in matches.values() if m.layer is not None):
        cut = cuts.get(match.module) or fuse([share_cut(n, tp_size) for n in match.lengths])
        if match.becomes(HeadParameters) or match.becomes(ParallelMultiheadAttention):
            # Their parameters may have several elements for each head.
            cut = cut.times(match.lengths[0] // cut.whole)
        result[match.module] = replace(match, cut=cut)
        # A layer that sums the ranks' outputs would count replicated heads twice.
        if cut.shared and match.layer is not None and not match.layer.replicable:
            most = min(map(len, cut.shared.values()))
            raise InvalidArgumentError(
                f"tp = {tp_size} leaves ranks without a shard of the heads of {match.place}: one "
                f"of its projections has {most} heads, which are not replicated, since the layer "
                f"sums its outputs over the ranks; tp sizes up to {most} are legal"
            )
    return result


def local_attributes(
    matches: Iterable[Match], attentions: Attentions, tp_size: int
) -> tuple[dict[nn.Module, dict[str, tuple[int, ...]]], list[Length]]:
    """Return each rank's values of changed attributes, and the values that tp must divide."""
    found = {module: attention.groups(tp_size) for module, attention in attentions.items()}
    divided: list[Length] = []
    for match in (m for m in matches if isinstance(m.style, Divide)):
        attention = attentions.get(match.module)
        shares = found.setdefault(match.module, {})
        for name in match.style.attributes:  # type: ignore[union-attr]
            value = vars(match.module)[name]
            share = attention and attention.share(name, value, tp_size)
            shares[name] = share or (value // tp_size,) * tp_size
            if share is None:  # it counts no heads
                divided.append((f"{match.name}.{name}".lstrip("."), value))
    return found, divided


def check_ties(view: ModelView, matches: Matches) -> None:
    """Refuse a tied parameter that the plan shards differently in its modules."""
    for owners in view.owners.values():
        names = [f"{view.names[module]}.{name}".lstrip(".") for module, name in owners]
        cuts: list[tuple[int | None, Cut | None]] = [(None, None)] * len(owners)
        for place, (module, name) in enumerate(owners):
            if module in matches:
                match = matches[module]
                cuts[place] = match.dims.get(name), match.cut_of(name)
        for name, cut in zip(names, cuts, strict=True):
            if cut != cuts[0]:
                raise InvalidArgumentError(
                    f"'{names[0]}' and '{name}' are one tied parameter, but the plan "
                    f"{_sharding(*cuts[0])} the first and {_sharding(*cut)} the second; give both "
                    "modules styles that agree"
                )


def _sharding(dim: int | None, cut: Cut | None) -> str:
    sizes = "" if cut is None else f" into {', '.join(map(str, cut.sizes[:8]))}"
    return "replicates" if dim is None else f"shards along dim {dim}{sizes}"
