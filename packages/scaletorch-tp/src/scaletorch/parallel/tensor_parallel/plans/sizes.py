"""Check that sizes can be divided over the ranks, and decide how."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from ....dist.errors import InvalidArgumentError
from ...placement import Cut, ModelView, fuse, share_cut
from ..layers.multihead import ParallelMultiheadAttention
from ..layers.own_parameters import HeadParameters
from ..styles import PerHead
from .attention import SHARED_KEYS, Attention, has_heads, head_length, latent_heads
from .plan import Divide, Match, Matches, children_of

# A size that is divided over the ranks: its description and its length.
Length = tuple[str, int]
Attentions = Mapping[nn.Module, Attention]


class Lengths(NamedTuple):
    """Lengths that tp must divide evenly, and lengths that must be at least tp."""

    divided: list[Length]
    shared: list[Length]


def find_lengths(
    view: ModelView, matches: Matches, attentions: Attentions, named: Mapping[str, nn.Module]
) -> Lengths:
    """Return the divided lengths: number of heads in recognised attention, else each size."""
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
    for name, module in named.items():
        if module not in attentions:
            found.divided.extend(_heads(module, name, matches))
    return found


def check_lengths(lengths: Lengths, tp_size: int) -> None:
    """Refuse a tp size that does not fit the lengths, and name sizes that do."""
    uneven = [f"{where} = {length}" for where, length in lengths.divided if length % tp_size]
    short = [f"{where} = {length}" for where, length in lengths.shared if length < tp_size]
    problems = [f"does not divide {_some(uneven)}"] if uneven else []
    problems += [f"leaves ranks without a share of {_some(short)}"] if short else []
    if not problems:
        return
    most = min((length for _, length in lengths.shared), default=None)
    common = math.gcd(*(length for _, length in lengths.divided))
    # If no length must be divided evenly, all sizes up to the shortest length are legal.
    legal = legal_sizes(common, tp_size, most) if common else f"tp sizes up to {most} are legal"
    raise InvalidArgumentError(
        f"tp = {tp_size} {' and '.join(problems)}; for this model and plan {legal}"
    )


def nearest_divisors(length: int, size: int, most: int | None = None) -> tuple[int, ...]:
    """Return the largest divisor of `length` below `size` and the smallest one at or above it.

    Divisors above `most` do not count.
    """
    limit = length if most is None else min(length, most)
    divisors = [d for d in range(1, limit + 1) if length % d == 0]
    return (*[d for d in divisors if d < size][-1:], *[d for d in divisors if d >= size][:1])


def legal_sizes(length: int, size: int, most: int | None = None) -> str:
    """Return text that names the legal tensor-parallel sizes nearest to `size`."""
    numbers = [str(d) for d in nearest_divisors(length, size, most)]
    return f"the nearest legal tp sizes are {' and '.join(numbers)}" if numbers else "none is legal"


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
    for match in matches:
        style, own, attention = match.style, vars(match.module), attentions.get(match.module)
        shares = found.setdefault(match.module, {})
        for name in style.attributes if isinstance(style, Divide) else ():
            if name in own:
                share = attention and attention.share(name, own[name], tp_size)
                shares[name] = share or (own[name] // tp_size,) * tp_size
                if share is None:  # it counts no heads
                    divided.append((f"{match.name}.{name}".lstrip("."), own[name]))
    return found, divided


def check_ties(view: ModelView, matches: Matches) -> None:
    """Refuse a tied parameter that the plan shards differently in its modules."""
    for owners in view.owners.values():
        names = [f"{view.names[module]}.{own}".lstrip(".") for module, own in owners]
        cuts = [_cut(matches.get(module), own) for module, own in owners]
        for name, cut in zip(names, cuts, strict=True):
            if cut != cuts[0]:
                raise InvalidArgumentError(
                    f"'{names[0]}' and '{name}' are one tied parameter, but the plan "
                    f"{_sharding(*cuts[0])} the first and {_sharding(*cut)} the second; give both "
                    "modules styles that agree"
                )


def _cut(match: Match | None, name: str) -> tuple[int | None, Cut | None]:
    return (None, None) if match is None else (match.dims.get(name), match.cut_of(name))


def _sharding(dim: int | None, cut: Cut | None) -> str:
    sizes = "" if cut is None else f" into {', '.join(map(str, cut.sizes[:8]))}"
    return "replicates" if dim is None else f"shards along dim {dim}{sizes}"


def _heads(attention: nn.Module, name: str, matches: Matches) -> Iterator[Length]:
    """Yield the number of heads of each projection of attention, so that no head is split."""
    latent = latent_heads(attention)
    if latent:
        yield f"heads of {name}", latent
        return
    columns = [m for m in children_of(attention, matches) if m.is_column]
    sizes = [(m.name.removeprefix(f"{name}."), size) for m in columns for size in m.lengths]
    longest = max((size for _, size in sizes), default=0)
    length = head_length(attention, longest)
    query = longest // max(length, 1)
    for projection, size in sizes:
        gate = length > 0 and size % length and size == query  # one feature for each head
        if not gate and (length < 1 or size % length):
            raise InvalidArgumentError(
                f"'{name}' does not say how the {size} output features of its {projection} are "
                "divided into heads: expected a head_dim, or a number of heads, on the module or "
                "its config; pass a plan of your own"
            )
        yield f"heads of {name}.{projection}", size if gate else size // length


_HEAD_NORM = "(q|k|query|key)_?(layer)?norm"


def check_of_heads(named: Mapping[str, nn.Module], matches: Matches) -> None:
    """Refuse replicated parameters in attention that span several heads.

    These are norms over several heads, and parameters with one element for each head.
    """
    for attention, module in named.items():
        mine = children_of(module, matches)
        sizes = [length for match in mine if match.is_column for length in match.lengths]
        length = head_length(module, max(sizes, default=0))
        if not length:
            continue  # `_heads` refuses it
        counts = {size // length for size in sizes} - {0, 1}
        own = isinstance(getattr(matches.get(module), "style", None), PerHead)
        for name, parameter in module.named_parameters(recurse=False):
            if not own and parameter.ndim == 1 and parameter.numel() in counts:
                raise InvalidArgumentError(
                    f"'{attention}.{name}' has {parameter.numel()} elements, as many as there are "
                    "heads, and the plan does not name it; pass a plan of your own, with PerHead "
                    "for the module"
                )
        told = {m.module for m in matches.values() if m.style != "replicate"}
        legal = (length, vars(module).get(SHARED_KEYS))  # the latter is shared by all heads
        for child, norm in module.named_children():
            if not re.fullmatch(_HEAD_NORM, child) or norm in told:
                continue
            for name, parameter in norm.named_parameters():
                if parameter.numel() not in legal:
                    raise InvalidArgumentError(
                        f"'{attention}.{child}.{name}' has {parameter.numel()} elements, but a "
                        f"head has {length}: a norm over several heads does not divide over "
                        "ranks; only one over each head can be tensor parallel"
                    )
