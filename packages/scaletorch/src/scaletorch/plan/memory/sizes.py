"""Bytes of a micro-batch by kinds of blocks, for several cuts at once: what is kept of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..description import Behaviour
from ..holding import Holdings
from ..holding.holdings import asked_together
from ..layout import Layout
from .by_cut import most, plus, scaled, total

Runs = tuple[tuple[int, int], ...]  # kinds of blocks, and how many follow one another
Exact = list[float]  # of each of `Holdings.cuts`
Whole = list[int]  # the same in whole bytes


class Sizes(NamedTuple):
    """Bytes of a micro-batch in blocks, by kinds: a number for every cut of `Holdings.cuts`.

    Attributes:
        kept: What autograd keeps of one: its input, if layers run again; nothing, if the host does.
        entered: What enters one, and so the gradient that it hands back.
        shared: What all of a chunk keep together, once.
        handed: What one hands on. One more, 0, is at its end: kind -1 of `Content` is none.
        halves: What the first half of a backward leaves of one for the second.
        under: What one keeps below those behind it while these run.
        forward: What one needs above that while it runs forward.
        backward: The same backward, in one or in the first half of it.
        left: `halves`, not rounded.
        chunks: What a chunk keeps, by the runs of its blocks; and what it needs, by the action too.
        column: Of `weights`, packed.
    """

    kept: list[Whole]
    entered: list[Exact]
    shared: list[Whole]
    handed: list[Whole]
    halves: list[Whole]
    under: list[Exact]
    forward: list[Exact]
    backward: tuple[list[Exact], list[Exact]]
    left: list[Exact]
    chunks: dict[object, Whole]
    column: list[int]


def sizes_of(known: Holdings, layout: Layout) -> Sizes:
    """Return what kinds of blocks keep and need in the cuts that are asked with a layout's."""
    key = layout.recompute, layout.micro_rows, asked_together(layout)
    found: Sizes | None = known.sizes.get(key)
    if found is None:
        found = known.sizes[key] = _sizes(known, layout)
    return found


def _sizes(known: Holdings, layout: Layout) -> Sizes:
    recompute, rows = layout.recompute, layout.micro_rows
    cuts = known.cuts(layout)
    behaviours = [known.description.cuts[cut] for cut in cuts]
    found = Sizes([], [], [], [], [], [], [], ([], []), [], {}, [])
    nothing = [0.0] * len(cuts)
    for kind, own in enumerate(zip(*behaviours, strict=True)):
        entered, again = _of_all(own, "entered", rows), nothing
        under = _of_all(own, "kept", rows)
        if kind in known.layers and recompute == "full":
            under, again = entered, _of_all(own, "again", rows)
        elif kind in known.layers and recompute == "offload":
            under = nothing
        shared = nothing if recompute == "offload" else _of_all(own, "shared", rows)
        found.kept.append(rounded(under))
        found.entered.append(entered)
        found.shared.append(rounded(shared))
        found.handed.append(rounded(_of_all(own, "handed", rows)))
        found.under.append(under)
        found.forward.append(_of_all(own, "forward_peak", rows))
        found.backward[0].append(plus(_of_all(own, "backward_peak", rows), again))
        found.backward[1].append(plus(_of_all(own, "parted_peak", rows), again))
        found.left.append(_of_all(own, "left", rows))
        found.halves.append(rounded(found.left[-1]))
    found.handed.append(rounded(nothing))
    return found


def _of_all(kind: Sequence[Behaviour], name: str, rows: int) -> Exact:
    return [getattr(own, name).at(rows) for own in kind]


def rounded(numbers: Exact) -> Whole:
    """Return whole bytes."""
    return [*map(round, numbers)]


def kept_in(sizes: Sizes, runs: Runs) -> Whole:
    """Return what autograd keeps of a micro-batch in a chunk."""
    found = sizes.chunks.get(runs)
    if found is None:
        kept = total(scaled(sizes.kept[kind], times) for kind, times in runs)
        found = sizes.chunks[runs] = plus(kept, shared_of(sizes, runs))
    return found


def shared_of(sizes: Sizes, runs: Runs) -> Whole:
    """Return what the blocks of a chunk keep together."""
    return most([sizes.shared[kind] for kind, _ in runs])


def halves_of(sizes: Sizes, runs: Runs) -> Whole:
    """Return what the first half of a backward of a chunk leaves for the second."""
    return total(scaled(sizes.halves[kind], times) for kind, times in runs)
