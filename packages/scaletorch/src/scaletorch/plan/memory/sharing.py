"""Bytes that a backward needs above what it keeps, with the buckets of a sharded optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..holding import Holdings
from ..holding.filling import LATER, Filled, bytes_of, filled
from ..holding.gathering import gathered, gathered_forward
from ..layout import Layout
from .gradual import Rows, needs_of
from .sizes import Sizes, sizes_of
from .working import Action, latest


def sharing(known: Holdings, layout: Layout, number: int, action: Action) -> int:
    """Return what an action needs that sums gradients into shards, above what all keep.

    Args:
        known: Of the description.
        layout: With ZeRO.
        number: Of the rank.
        action: "B", or "I" or "W" for a half of a backward.
    """
    kind, chunk, _ = action
    sizes = sizes_of(known, layout.recompute, layout.micro_rows)
    at = known.place_of_cut(layout)
    if layout.zero == 3:
        moments = gathered(known, layout, number)
        comes = moments.bytes
    else:
        moments = filled(known, layout, number, kind, chunk)
        comes = bytes_of(known, layout, number, kind, chunk)
    kinds = known.content(number).chunks[chunk][::-1]
    each = _each(known, layout, sizes, at)[:, kinds]
    if kind == "W":  # each frees what the first half has left
        largest = int(latest(known, number, sizes.selective)[chunk][at])
        base = largest - _behind(each[2])
        base[-1] -= largest
        return max(0, round(float((comes + base[moments.blocks]).max())))
    half = kind == "I"
    needs, rows = needs_of(known, layout, sizes, at, half=half)
    base = _behind(each[2] * half - each[0])
    base[1:-1] += each[1, :-1]  # the gradient of its output
    key = layout.cut, number, kind, chunk, layout.zero
    if key not in known.made:
        known.made[key] = torch.tensor(list(_places(moments, kinds, rows)))
    most = comes + base[moments.blocks] + needs[known.made[key]]
    return max(0, round(float(most.max())))


def gathering(known: Holdings, layout: Layout, number: int) -> int:
    """Return what a forward needs with ZeRO 3, above what all keep."""
    sizes = sizes_of(known, layout.recompute, layout.micro_rows)
    at, kinds = known.place_of_cut(layout), known.content(number).chunks[0]
    under = _each(known, layout, sizes, at)[0, list(kinds)].cumsum(0)
    own = torch.stack([sizes.forward[kind][at] for kind in kinds])
    whole = torch.tensor(gathered_forward(known, layout, number))
    return max(0, round(float((under + own + whole).max() - under[-1])))


def _each(known: Holdings, layout: Layout, sizes: Sizes, at: int) -> Tensor:
    """Return by kinds what blocks keep, their inputs, and what they leave for later, [3, kinds]."""
    key = layout.cut, layout.recompute, layout.micro_rows
    if key not in known.made:
        parts = sizes.under, sizes.entered, sizes.halves
        known.made[key] = torch.stack([torch.stack([own[at] for own in p]).double() for p in parts])
    return known.made[key]  # type: ignore[no-any-return]


def _behind(sizes: Tensor) -> Tensor:
    """Return the sums of those before each, and of all."""
    return torch.cat((torch.zeros(1, dtype=sizes.dtype), sizes.cumsum(0)))


def _places(moments: Filled, kinds: tuple[int, ...], rows: Rows) -> Iterator[int]:
    """Yield for each moment the place of what its block needs then."""
    each = (*kinds, -1)
    for at, *of in zip(moments.blocks.tolist(), moments.names, moments.parts, strict=True):
        yield rows.get((each[at], *of), rows[each[at], "", LATER])
