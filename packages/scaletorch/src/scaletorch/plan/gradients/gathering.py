"""What ZeRO 3 has whole while a micro-batch runs, as `fully_shard` of torch has it.

What is outside of layers is gathered once and stays. A layer is gathered while the one behind it
runs backward, and goes when its own backward ends. Its gradients are whole until they are copied
to be summed, and the copy stays until the next layer's are made. Forward has what was gathered of a
layer beside its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..holding.buckets import Held
from ..holding.holdings import Holdings
from ..layout import Layout
from .filling import COMES, LATER, PARTS, Filled, gradients_in

Moment = tuple[int, str, int, int]  # block from the last, whose gradient, of `PARTS`, and bytes


class Whole(NamedTuple):
    """A block's parameters, and their gradients.

    Attributes:
        layer: Bytes of all if they are gathered apart from other blocks', else 0.
        rest: The same if they are not.
        share: Bytes of this rank's shard.
        gradients: Bytes by name.
    """

    layer: int
    rest: int
    share: int
    gradients: dict[str, int]


def gathered(known: Holdings, layout: Layout, number: int) -> Filled:
    """Follow a backward.

    Args:
        known: Of the description.
        layout: With ZeRO 3.
        number: Of a rank, of `known.numbers(layout)`.
    """
    grid = layout.grid
    alone = layout.micro_batches == 1  # else shards of gradients are there before
    key = grid.tp, grid.ep, grid.etp, grid.cp * grid.dp, number, alone, "gathered"
    found: Filled | None = known.filled.get(key)
    if found is None:
        moments = _followed(known, layout, number, alone=alone)
        blocks, names, parts, sizes = zip(*moments, strict=True)
        found = known.filled[key] = Filled(blocks, names, parts, tuple((size,) for size in sizes))
    return found


def gathered_forward(known: Holdings, layout: Layout, number: int) -> list[int]:
    """Return what is whole while each block runs forward; what has just come is there twice."""
    wholes = _wholes(known, layout, number)
    rest = sum(each.rest for each in wholes)
    first = [any(each.layer for each in wholes[: at + 1]) for at in range(len(wholes))].index(True)
    return [rest * (2 if at < first else 1) + 2 * each.layer for at, each in enumerate(wholes)]


def _wholes(known: Holdings, layout: Layout, number: int) -> list[Whole]:
    return [
        _whole(layout, held, layer=layer)
        for held, times, layer in known.of_blocks(layout, number)
        for _ in range(times)
    ]


def _whole(layout: Layout, held: tuple[Held, ...], *, layer: bool) -> Whole:
    grid = layout.grid
    ranks = [grid.edp if each.expert else grid.cp * grid.dp for each in held]
    shares = [-(-each.elements // n) * each.item for each, n in zip(held, ranks, strict=True)]
    whole = sum(share * n for share, n in zip(shares, ranks, strict=True))
    gradients = {each.name: each.elements * each.item for each in held}
    return Whole(whole * layer, whole * (not layer), sum(shares), gradients)


def _followed(known: Holdings, layout: Layout, number: int, *, alone: bool) -> Iterator[Moment]:
    wholes = _wholes(known, layout, number)
    rest, shards = sum(each.rest for each in wholes), sum(e.share for e in wholes if e.layer)
    travels = 1 - known.optimizer.native  # whether what travels has another memory meanwhile
    sizes = _sizes(known, wholes)
    stay = behind = 0  # gradients that are whole, and shards; what is being summed
    order = list(gradients_in(known, layout, number, "B", 0))
    for place, (at, names) in enumerate(order):
        own, ahead = wholes[at], wholes[at - 1].layer if at else 0
        now = rest + own.layer + ahead + behind + stay
        coming = max(own.layer - ahead, ahead * travels)  # into parameters, or into memory at all
        yield place, "", COMES, now + coming * bool(own.layer)
        yield place, "", LATER, now - ahead * (place == 0)  # which waits for the loss's backward
        there = 0
        for name in names:
            for part in PARTS:
                yield place, name.partition(".")[2], part, now + there
                there += sizes(at, name) * (part == COMES)
        if own.layer:
            left = rest + ahead + stay
            yield place + 1, "", COMES, left + there + own.layer
            yield place + 1, "", COMES, left + own.layer * (1 + travels) + own.share
            stay, behind = stay + own.share * alone, own.layer
        else:
            stay += there
    yield len(order), "", LATER, stay + rest
    yield (
        len(order),
        "",
        LATER,
        shards * alone
        + rest * (1 + travels)
        + sum(each.share for each in wholes if not each.layer),
    )


def _sizes(known: Holdings, wholes: list[Whole]) -> Callable[[int, str], int]:
    """Return what tells the bytes of a block's gradient; of tied ones the first has all."""
    tied = {name: names for names in known.description.tied for name in names}
    whole = {tied[n]: size for w in wholes for n, size in w.gradients.items() if n in tied}

    def size(at: int, name: str) -> int:
        if name in tied:
            return whole.pop(tied[name], 0)
        return wholes[at].gradients.get(name, 0)

    return size
