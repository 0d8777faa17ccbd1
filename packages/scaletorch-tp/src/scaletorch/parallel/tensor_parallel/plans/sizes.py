"""Check that sizes can be divided over the ranks, and decide how."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from ....dist.errors import InvalidArgumentError
from ...placement import Cut, ModelView, fuse, share_cut
from ..layers.multihead import ParallelMultiheadAttention
from ..layers.own_parameters import HeadParameters
from ..styles import Divide
from .attention import Attention, has_heads
from .plan import Match, Matches, children_of

# A size that is divided over the ranks: its description and its length.
Length = tuple[str, int]
Attentions = Mapping[nn.Module, Attention]


class Lengths(NamedTuple):
    """Lengths that tp must divide evenly, and lengths that must be at least tp."""

    divided: list[Length]
    shared: list[Length]


def find_lengths(
    view: ModelView,
    matches: Matches,
    attentions: Attentions,
    named: Mapping[str, nn.Module],
    tp_size: int,
) -> Lengths:
    """Return the divided lengths: number of heads in recognised attention, else each size.

    Attention in `named` whose heads are not recognised is refused, except on one rank.
    """
    by_heads = {layer for attention in attentions.values() for layer in attention.lengths}
    # Layers with heads of unknown length: an uneven division might split a head.
    whole = {
        match.module
        for module in view.names
        if has_heads(module)
        for match in children_of(module, matches)
        if (match.is_column or match.is_row) and match.module not in by_heads
    }
    found = Lengths([], [(f"query heads of {a.name}", a.query) for a in attentions.values()])
    for match in matches.values():
        if match.layer is not None and match.module not in by_heads:
            where = f"{match.name}.{match.layer.sharded_size}".lstrip(".")
            kind = found.divided if match.module in whole else found.shared
            kind.extend((where, length) for length in match.lengths)
    unknown = [name for name, module in named.items() if module not in attentions]
    for name in unknown if tp_size > 1 else ():
        raise InvalidArgumentError(
            f"the features of the projections of '{name}' are not understood as heads: expected a "
            "head_dim, or a number of heads, on the module or its config, and query heads that are "
            "a multiple of key/value heads; pass a plan of your own"
        )
    return found


def check_lengths(lengths: Lengths, tp_size: int) -> None:
    """Refuse a tp size that does not fit the lengths, and name sizes that do."""
    uneven = [f"{where} = {length}" for where, length in lengths.divided if length % tp_size]
    short = [f"{where} = {length}" for where, length in lengths.shared if length < tp_size]
    problems = [f"does not divide {_some(uneven)}"] if uneven else []
    problems += [f"leaves ranks without a share of {_some(short)}"] if short else []
    if not problems:
        return
    most = min(length for _, length in [*lengths.shared, *lengths.divided])
    common = math.gcd(*(length for _, length in lengths.divided))
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
        _check_replicas(result[match.module], cut)
    return result


def _check_replicas(match: Match, cut: Cut) -> None:
    """Refuse replicated heads in a layer that sums the ranks' outputs: they would count twice."""
    short = [*map(len, cut.shared.values())]
    if short and match.layer is not None and not match.layer.replicable:
        most = min(short)
        raise InvalidArgumentError(
            f"tp = {len(cut.ranges)} leaves ranks without a share of the heads of "
            f"{match.place}: a part of it has {most}, and is not replicated, since the "
            f"layer sums what ranks have; tp sizes up to {most} are legal"
        )


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
