"""Bytes that a chunk needs to run, above what it keeps of micro-batches, for cuts at once."""

from __future__ import annotations

from operator import sub

from ...parallel.pg_manager import Grid
from ..description import Cut
from ..gradients.brought import END, Brought
from ..gradients.ties import of_ties
from ..holding import Holdings
from ..holding.holdings import asked_together
from ..layout import Layout, Recompute
from .by_cut import most, plus, scaled, total
from .gradual import grown
from .sizes import Exact, Runs, Sizes, Whole, halves_of

Gradients = tuple[int, ...]  # bytes of a block of each run, if an action brings them
Action = tuple[str, int, bool]  # kind and chunk, and whether it brings gradients


def works(
    known: Holdings,
    sizes: Sizes,
    number: int,
    action: Action,
    own: Brought | None,
    layout: Layout,
) -> Whole:
    """Return what an action needs above what all keep, with the gradients that it brings.

    Args:
        known: Of the description.
        sizes: Of blocks.
        number: Of the rank.
        action: Of it.
        own: What is brought to the rank, if it is: then only the number of the layout's cut is
            right, whose gradients these are.
        layout: With one of the cuts of `sizes`.
    """
    kind, chunk, first = action
    if kind == END:
        return [of_ties(known, layout, number)[1]] * len(sizes.handed[0])
    runs = known.runs(number)[chunk]
    if kind == "W":
        return _ending(known, layout, sizes, number, chunk, own if first else None)
    comes: Gradients = ()
    inside: Gradients = ()
    if own is not None and first:
        comes = tuple(early + late * (kind == "B") for early, late in own.runs[chunk])
        inside = grown(known, layout, number, chunk, kind)
    return needed(sizes, runs, kind, comes, inside)


def _ending(
    known: Holdings, layout: Layout, sizes: Sizes, number: int, chunk: int, own: Brought | None
) -> Whole:
    """Return what second halves need: each frees what the first has left, and makes a gradient."""
    largest = latest(known, layout, number)[chunk]
    if own is None:
        return largest
    runs = known.runs(number)[chunk]
    made = sum(late * n for (_, late), (_, n) in zip(own.runs[chunk], runs, strict=True))
    halves = halves_of(sizes, runs)
    return [max(size, made - left) for size, left in zip(largest, halves, strict=True)]


def latest(known: Holdings, layout: Layout, number: int) -> list[Whole]:
    """Return `Holdings.latest` by chunk, for every cut that is asked with a layout's."""
    key = number, asked_together(layout)
    found: list[Whole] | None = known.late.get(key)
    if found is None:
        by_cut = [_latest(known, cut, number) for cut in known.cuts(layout)]
        found = known.late[key] = [[*own] for own in zip(*by_cut, strict=True)]
    return found


def _latest(known: Holdings, cut: Cut, number: int) -> tuple[int, ...]:
    key = number, cut.tp, cut.ep
    found: tuple[int, ...] | None = known.late.get(key)
    if found is None:
        grid = Grid(cut.tp, cut.cp, dp=cut.ep, ep=cut.ep)
        recompute: Recompute = "selective" if cut.selective else "none"
        layout = Layout(grid, cut.sequence_parallel, recompute, cp_method=cut.cp_method)
        found = known.late[key] = known.latest(layout, number)
    return found


def needed(
    sizes: Sizes, runs: Runs, action: str, comes: Gradients = (), inside: Gradients = ()
) -> Whole:
    """Return what a chunk needs to run an action, above what it keeps.

    While a block runs, those behind it keep nothing yet, or no more: but for what the first half of
    a backward leaves, gradients that are brought, and the gradient of its output. Of the last block
    that is a message, or a loss's.

    Args:
        sizes: Of blocks.
        runs: Of the chunk.
        action: "F", "B" or "I".
        comes: Gradients that the action brings, if it does.
        inside: What a block needs more while its own come.
    """
    if len(runs) == 1 and action != "I" and not comes:  # however many there are, it is the last two
        runs = ((runs[0][0], min(runs[0][1], 2)),)
    key = runs, action, comes, inside
    found = sizes.chunks.get(key)
    if found is None:
        if action == "F":
            largest = _forward(sizes, runs)
        else:
            nothing = (0,) * len(runs)
            largest = _backward(sizes, runs, action, comes or nothing, inside or nothing)
        found = sizes.chunks[key] = [max(0, round(number)) for number in largest]
    return found


def _forward(sizes: Sizes, runs: Runs) -> Exact:
    under = [0.0] * len(sizes.handed[0])
    each = []
    for kind, times in runs:
        under = plus(under, scaled(sizes.under[kind], times))
        each.append(plus(under, sizes.forward[kind]))  # of equal blocks the last has most below it
    return [*map(sub, most(each), under)]


def _backward(sizes: Sizes, runs: Runs, action: str, comes: Gradients, inside: Gradients) -> Exact:
    nothing, half = [0.0] * len(sizes.handed[0]), action == "I"
    handing = [*(sizes.entered[kind] for kind, _ in runs[1:]), nothing]
    leaves = [
        [left + own for left in sizes.left[kind]] if half else [float(own)] * len(nothing)
        for (kind, _), own in zip(runs, comes, strict=True)
    ]
    behind = total(scaled(own, times) for own, (_, times) in zip(leaves, runs, strict=True))
    under, each = nothing, []
    for (kind, times), own, handed, more in zip(runs, leaves, handing, inside, strict=True):
        behind = plus(behind, scaled(own, -times))
        needs = total((sizes.backward[half][kind], behind, under, [float(more)] * len(nothing)))
        keeps, entered = sizes.under[kind], sizes.entered[kind]
        # Of equal blocks the last has the most before it, and the first the most behind it.
        each.append(total((needs, scaled(keeps, times), handed)))
        for after in {min(times, 2) - 1, (times - 1) * any(own)} - {0}:
            each.append(total((needs, scaled(keeps, times - after), scaled(own, after), entered)))
        under = plus(under, scaled(keeps, times))
    return [*map(sub, most(each), under)]
