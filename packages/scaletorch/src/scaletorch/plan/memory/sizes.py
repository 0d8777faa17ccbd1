"""Bytes of a micro-batch by kinds of blocks, for all cuts at once: what is kept of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..description import Behaviour
from ..holding import Holdings
from ..layout import Recompute

Runs = tuple[tuple[int, int], ...]  # kinds of blocks, and how many follow one another


class Sizes(NamedTuple):
    """Bytes of a micro-batch in blocks, by kinds: a number for every cut of `Holdings.cuts`.

    Attributes:
        selective: Whether the cuts are those with selective recomputation.
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
        column: Of `weights`.
    """

    selective: bool
    kept: list[Tensor]
    entered: list[Tensor]
    shared: list[Tensor]
    handed: list[Tensor]
    halves: list[Tensor]
    under: list[Tensor]
    forward: list[Tensor]
    backward: tuple[list[Tensor], list[Tensor]]
    left: list[Tensor]
    chunks: dict[object, Tensor]
    column: list[Tensor]


def sizes_of(known: Holdings, recompute: Recompute, rows: int) -> Sizes:
    """Return what kinds of blocks keep and need in all cuts."""
    found: Sizes | None = known.sizes.get((recompute, rows))
    if found is None:
        found = known.sizes[recompute, rows] = _sizes(known, recompute, rows)
    return found


def _sizes(known: Holdings, recompute: Recompute, rows: int) -> Sizes:
    offloaded, selective = recompute == "offload", recompute == "selective"
    cuts = known.cuts(selective)
    behaviours = [known.description.cuts[cut] for cut in cuts]
    found = Sizes(selective, [], [], [], [], [], [], [], ([], []), [], {}, [])
    nothing = torch.zeros(len(cuts), dtype=torch.float64)
    for kind, own in enumerate(zip(*behaviours, strict=True)):
        entered, again = _of_all(own, "entered", rows), nothing
        under = _of_all(own, "kept", rows)
        if kind in known.layers and recompute == "full":
            under, again = entered, _of_all(own, "again", rows)
        elif kind in known.layers and offloaded:
            under = nothing
        found.kept.append(rounded(under))
        found.entered.append(entered)
        found.shared.append(rounded(nothing if offloaded else _of_all(own, "shared", rows)))
        found.handed.append(rounded(_of_all(own, "handed", rows)))
        found.under.append(under)
        found.forward.append(_of_all(own, "forward_peak", rows))
        found.backward[0].append(_of_all(own, "backward_peak", rows) + again)
        found.backward[1].append(_of_all(own, "parted_peak", rows) + again)
        found.left.append(_of_all(own, "left", rows))
        found.halves.append(rounded(found.left[-1]))
    found.handed.append(rounded(nothing))
    return found


def _of_all(kind: Sequence[Behaviour], name: str, rows: int) -> Tensor:
    return torch.tensor([getattr(own, name).at(rows) for own in kind], dtype=torch.float64)


def rounded(numbers: Tensor) -> Tensor:
    """Return whole bytes."""
    return numbers.round().long()


def kept_in(sizes: Sizes, runs: Runs) -> Tensor:
    """Return what autograd keeps of a micro-batch in a chunk."""
    found = sizes.chunks.get(runs)
    if found is None:
        shared = shared_of(sizes, runs)
        found = sizes.chunks[runs] = sum([sizes.kept[kind] * times for kind, times in runs], shared)
    return found


def shared_of(sizes: Sizes, runs: Runs) -> Tensor:
    """Return what the blocks of a chunk keep together."""
    return torch.stack([sizes.shared[kind] for kind, _ in runs]).amax(0)


def halves_of(sizes: Sizes, runs: Runs) -> Tensor:
    """Return what the first half of a backward of a chunk leaves for the second."""
    nothing = torch.zeros_like(sizes.halves[0])
    return sum([sizes.halves[kind] * times for kind, times in runs], nothing)
