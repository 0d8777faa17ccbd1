"""Which lengths of a model are divided over the ranks, and whether tp fits them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from ....dist.errors import InvalidArgumentError
from ..cuts.cut import legal_sizes
from .heads import Attention, has_heads, is_column, is_row, sharded_layers
from .plan import Divide, Match

# What is divided over the ranks: where it is, and how long.
Length = tuple[str, int]


class Lengths(NamedTuple):
    """Lengths that tp must divide, and those of which each rank must get a share at least."""

    divided: list[Length]
    shared: list[Length]


def find_lengths(
    model: nn.Module,
    matches: Sequence[Match],
    attentions: Mapping[nn.Module, Attention],
    tp_size: int,
) -> Lengths:
    """Return what is divided: in attention that was understood the heads, else each size."""
    by_heads = {layer for attention in attentions.values() for layer in attention.lengths}
    kinds = sharded_layers(matches)
    whole = {  # cut anywhere, such a layer may cut a head in two
        child
        for module in model.modules()
        if has_heads(module)
        for child in module.children()
        if child in kinds and child not in by_heads
        if is_column(kinds[child]) or is_row(kinds[child])
    }
    found = Lengths([], [(f"query heads of {a.name}", a.query) for a in attentions.values()])
    for match in matches:
        if isinstance(match.style, Divide):
            found.divided.extend(_undivided(match, match.style, attentions, tp_size))
        elif match.layer is not None and match.module not in by_heads:
            where = f"{match.name}.{match.layer.sharded_size}".lstrip(".")
            kind = found.divided if match.module in whole else found.shared
            kind.extend((where, length) for length in match.lengths)
    return found


def _undivided(
    match: Match, style: Divide, attentions: Mapping[nn.Module, Attention], tp_size: int
) -> Iterator[Length]:
    """Yield the attributes that are not cut as heads are: tp must divide them."""
    own, attention = vars(match.module), attentions.get(match.module)
    for name in (n for n in style.attributes if n in own):
        if attention is None or attention.share(name, own[name], tp_size) is None:
            yield f"{match.name}.{name}".lstrip("."), own[name]


def local_attributes(
    matches: Sequence[Match], attentions: Mapping[nn.Module, Attention], tp_size: int
) -> dict[nn.Module, dict[str, tuple[int, ...]]]:
    """Return the values on each rank of the attributes that change."""
    found = {module: attention.groups(tp_size) for module, attention in attentions.items()}
    for module, style in ((m.module, m.style) for m in matches):
        own, attention = vars(module), attentions.get(module)
        shares = found.setdefault(module, {})
        for name in style.attributes if isinstance(style, Divide) else ():
            if name in own:
                share = attention and attention.share(name, own[name], tp_size)
                shares[name] = share or (own[name] // tp_size,) * tp_size
    return found


def check_lengths(lengths: Lengths, tp_size: int) -> None:
    """Refuse a tp that does not fit the lengths, and name sizes that do.

    Raises:
        InvalidArgumentError: tp does not divide what it must, or leaves a rank without a share.
    """
    uneven = [f"{where} = {length}" for where, length in lengths.divided if length % tp_size]
    short = [f"{where} = {length}" for where, length in lengths.shared if length < tp_size]
    problems = [f"does not divide {_some(uneven)}"] if uneven else []
    problems += [f"leaves ranks without a share of {_some(short)}"] if short else []
    if not problems:
        return
    most = min((length for _, length in lengths.shared), default=None)
    common = math.gcd(*(length for _, length in lengths.divided))
    # Where nothing has to divide, all sizes up to the shortest length are legal.
    legal = legal_sizes(common, tp_size, most) if common else f"tp sizes up to {most} are legal"
    raise InvalidArgumentError(
        f"tp = {tp_size} {' and '.join(problems)}; for this model and plan {legal}"
    )


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")
