"""Bytes that a chunk needs to run, above what it keeps of micro-batches, for all cuts at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ...parallel.pg_manager import Grid
from ..description import Cut
from ..holding import Holdings
from ..holding.brought import END, Brought
from ..holding.ties import of_ties
from ..layout import Layout, Recompute
from .gradual import grown
from .sizes import Runs, Sizes, halves_of, rounded

Gradients = tuple[int, ...]  # bytes of a block of each run, if an action brings them
Action = tuple[str, int, bool]  # kind and chunk, and whether it brings gradients


def works(
    known: Holdings,
    sizes: Sizes,
    number: int,
    action: Action,
    own: Brought | None = None,
    layout: Layout | None = None,
) -> Tensor:
    """Return what an action needs above what all keep, with the gradients that it brings.

    Args:
        known: Of the description.
        sizes: Of blocks.
        number: Of the rank.
        action: Of it.
        own: What is brought to the rank, if it is: then only the number of the cut is right whose
            gradients these are.
        layout: With that cut, if so.
    """
    kind, chunk, first = action
    if kind == END:
        others = of_ties(known, layout, number)[1] if layout else 0
        return torch.full_like(sizes.kept[0], others)
    runs = known.runs(number)[chunk]
    if kind == "W":
        return _ending(known, sizes, number, chunk, own if first else None)
    comes: Gradients = ()
    inside: Gradients = ()
    if own is not None and layout is not None and first:
        comes = tuple(early + late * (kind == "B") for early, late in own.runs[chunk])
        inside = grown(known, layout, number, chunk, kind)
    return needed(sizes, runs, kind, comes, inside)


def _ending(known: Holdings, sizes: Sizes, number: int, chunk: int, own: Brought | None) -> Tensor:
    """Return what second halves need: each frees what the first has left, and makes a gradient."""
    largest = latest(known, number, sizes.selective)[chunk]
    if own is None:
        return largest
    runs = known.runs(number)[chunk]
    made = sum(late * n for (_, late), (_, n) in zip(own.runs[chunk], runs, strict=True))
    return torch.maximum(largest, made - halves_of(sizes, runs))


def latest(known: Holdings, number: int, selective: bool) -> list[Tensor]:
    """Return `Holdings.latest` by chunk, for every cut."""
    found: list[Tensor] | None = known.late.get((number, selective))
    if found is None:
        cuts = known.cuts(selective)
        alike = {(cut.tp, cut.ep): cut for cut in cuts}
        each = {key: known.latest(_layout(cut), number) for key, cut in alike.items()}
        by_cut = [each[cut.tp, cut.ep] for cut in cuts]
        found = [torch.tensor(own) for own in zip(*by_cut, strict=True)]
        known.late[number, selective] = found
    return found


def _layout(cut: Cut) -> Layout:
    """Return a layout with a cut."""
    grid = Grid(cut.tp, cut.cp, dp=cut.ep, ep=cut.ep)
    recompute: Recompute = "selective" if cut.selective else "none"
    return Layout(grid, cut.sequence_parallel, recompute, cp_method=cut.cp_method)


def needed(
    sizes: Sizes, runs: Runs, action: str, comes: Gradients = (), inside: Gradients = ()
) -> Tensor:
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
    key = runs, action, comes, inside
    found = sizes.chunks.get(key)
    if found is None:
        if action == "F":
            most = _forward(sizes, runs)
        else:
            most = _backward(sizes, runs, action, comes, inside or (0,) * len(runs))
        found = sizes.chunks[key] = rounded(most.clamp(min=0))
    return found


def _forward(sizes: Sizes, runs: Runs) -> Tensor:
    under = torch.zeros_like(sizes.under[0])
    each = []
    for kind, times in runs:
        under = under + sizes.under[kind] * times
        each.append(under + sizes.forward[kind])  # of equal blocks the last has the most below it
    return torch.stack(each).amax(0) - under


def _backward(sizes: Sizes, runs: Runs, action: str, comes: Gradients, inside: Gradients) -> Tensor:
    nothing = torch.zeros_like(sizes.under[0])
    leaves = [sizes.left[kind] if action == "I" else nothing for kind, _ in runs]
    if comes:
        leaves = [left + own for left, own in zip(leaves, comes, strict=True)]
    behind = sum([own * times for own, (_, times) in zip(leaves, runs, strict=True)], nothing)
    handing = [*(sizes.entered[kind] for kind, _ in runs[1:]), nothing]
    under, each = nothing, []
    for (kind, times), own, handed, more in zip(runs, leaves, handing, inside, strict=True):
        behind = behind - own * times
        needs = sizes.backward[action == "I"][kind] + behind + more
        # Of equal blocks the last has the most before it, and the first the most behind it.
        for place in {0, max(times - 2, 0), times - 1}:
            output = handed if place == times - 1 else sizes.entered[kind]
            now = under + sizes.under[kind] * (place + 1)
            each.append(now + (needs + own * (times - 1 - place)) + output)
        under = under + sizes.under[kind] * times
    return torch.stack(each).amax(0) - under
