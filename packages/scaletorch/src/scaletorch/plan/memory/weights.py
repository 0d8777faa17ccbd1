"""What ranks have at their moments, as weights on the bytes of kinds of blocks.

A search sums the same moments for cut after cut: the weights are worked out once, and then one
product has the sums of all cuts. Rounded bytes are whole numbers, so it is those of
`fullest_moment`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ...parallel.pg_manager import Grid
from ..description import Cut
from ..holding import Holdings
from ..holding.live import Counts, outer
from ..layout import Layout, Recompute
from .busy import Busy
from .running import Sizes, chunk_of, sizes_of

Weights = tuple[int, ...]


class Told(NamedTuple):
    """Ranks of a pipeline with their moments as weights.

    Attributes:
        ranks: Number and halves of each, as `Busy`.
        actions: Of each moment: the rank's number, and kind and chunk of the action.
        counts: How many of the moments each rank has.
        weights: Of each moment, on `_column`.
    """

    ranks: list[tuple[int, tuple[bool, ...]]]
    actions: list[tuple[int, str, int]]
    counts: list[int]
    weights: Tensor


def told(known: Holdings, ranks: Iterable[Busy], *, offloaded: bool) -> Told:
    """Return ranks with their moments as weights; `offloaded`: whether what they receive stays."""
    own: list[tuple[int, tuple[bool, ...]]] = []
    actions: list[tuple[int, str, int]] = []
    counts: list[int] = []
    rows: list[Weights] = []
    for number, halves, moments in ranks:
        each: dict[tuple[str, int], set[Weights]] = {}
        for action, _, now in moments:
            each.setdefault(action, set()).add(_weights(known, number, now, offloaded))
        # Chunks alike have the same bytes, so that of weights more can be left out than of counts.
        left = [(action, row) for action, found in each.items() for row in outer(found)]
        own.append((number, halves))
        counts.append(len(left))
        actions += [(number, *action) for action, _ in left]
        rows += [row for _, row in left]
    width = max(map(len, rows))
    weights = torch.tensor([row + (0,) * (width - len(row)) for row in rows])
    return Told(own, actions, counts, weights)


def fullest(known: Holdings, recompute: Recompute, rows: int, ranks: Told) -> list[list[int]]:
    """Return for every cut the most bytes of micro-batches under way on each rank."""
    sizes, selective = sizes_of(known, recompute, rows), recompute == "selective"
    column = torch.stack(_column(known, sizes)[: ranks.weights.shape[1]])
    works = torch.stack([_works(known, sizes, selective, *each) for each in ranks.actions])
    moments = torch.split(ranks.weights @ column + works, ranks.counts)
    found = torch.stack([own.amax(0) for own in moments])
    if not known.description.early:
        found += torch.stack([_always(known, sizes, number) for number, _ in ranks.ranks])
    most: list[list[int]] = found.T.tolist()
    return most


def _works(
    known: Holdings, sizes: Sizes, selective: bool, number: int, kind: str, chunk: int
) -> Tensor:
    """Return what an action needs above what is kept."""
    if kind == "W":
        return _latest(known, number, selective)[chunk]
    return chunk_of(sizes, known.runs(number)[chunk], split=kind == "I")[1]


def _latest(known: Holdings, number: int, selective: bool) -> list[Tensor]:
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


def _always(known: Holdings, sizes: Sizes, number: int) -> Tensor:
    content = known.content(number)
    return torch.stack(
        [
            torch.stack([sizes.handed[kind] for kind in kinds]).amax(0)
            for kinds in (content.left, content.entered)
        ]
    ).sum(0)


def _column(known: Holdings, sizes: Sizes) -> list[Tensor]:
    """Return what is weighed: by kinds what they keep, leave and hand on; `shared` of chunks."""
    found, plain = sizes.column, 3 * known.all_kinds + 1
    if not found:
        found += [*sizes.kept, *sizes.halves, *sizes.handed]
    for kinds in known.kinds_of_chunks[len(found) - plain :]:
        found.append(torch.stack([sizes.shared[kind] for kind in kinds]).amax(0))
    return found


def _weights(known: Holdings, number: int, counts: Counts, offloaded: bool) -> Weights:
    """Return the weights of `Moment.counts`, as `Running.sizes` has their bytes."""
    content, early, runs = known.content(number), known.description.early, known.runs(number)
    chunks, kinds = len(runs), known.all_kinds
    whole, halves = counts[:chunks], counts[chunks : -2 * chunks]
    sent, received = counts[-2 * chunks : -chunks], counts[-chunks:]
    handed, places = 2 * kinds, [known.place_of_kinds(own) for own in runs]
    found = [0] * (3 * kinds + 1 + len(known.kinds_of_chunks))
    for chunk, own in enumerate(runs):
        found[3 * kinds + 1 + places[chunk]] += whole[chunk]
        for kind, times in own:
            found[kind] += whole[chunk] * times
            found[kinds + kind] += halves[chunk] * times if halves else 0
        left, entered = (each[chunk] % (kinds + 1) for each in (content.left, content.entered))
        found[handed + left] += sent[chunk] if early else whole[chunk]
        found[handed + entered] += received[chunk] * early + whole[chunk] * offloaded
    return tuple(found)
