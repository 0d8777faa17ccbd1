"""What ranks have at their moments, as weights on the bytes of kinds of blocks.

A search sums the same moments for cut after cut: the weights are worked out once, and then one
product has the sums of all cuts. Rounded bytes are whole numbers, so it is those of
`fullest_moment`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from ..holding import Holdings
from ..holding.brought import Brought
from ..holding.live import Counts, outer
from ..layout import Layout, Recompute
from .busy import Busy
from .sizes import Sizes, sizes_of
from .working import Action, works

Weights = tuple[int, ...]


class Told(NamedTuple):
    """Ranks of a pipeline with their moments as weights.

    Attributes:
        ranks: Number and halves of each, as `Busy`.
        actions: Of each moment: the rank's number, and the action.
        groups: Of moments of the same rank and action: the rank's place, and the action.
        counts: How many of the groups each rank has.
        sizes: How many of the moments each group has.
        weights: Of each moment, on `_column`.
        made: Of each moment, as `Moment.made`.
    """

    ranks: list[tuple[int, tuple[bool, ...]]]
    actions: list[tuple[int, Action]]
    groups: list[tuple[int, Action]]
    counts: list[int]
    sizes: list[int]
    weights: Tensor
    made: list[Counts]


def told(known: Holdings, ranks: Iterable[Busy], *, offloaded: bool) -> Told:
    """Return ranks with their moments as weights; `offloaded`: whether what they receive stays."""
    own: list[tuple[int, tuple[bool, ...]]] = []
    actions: list[tuple[int, Action]] = []
    counts: list[int] = []
    groups: list[tuple[int, Action]] = []
    sizes: list[int] = []
    rows: list[Weights] = []
    made: list[Counts] = []
    for place, (number, halves, moments) in enumerate(ranks):
        each: dict[Action, set[Weights]] = {}
        for action, _, now, there in moments:
            row = *there, *_weights(known, number, now, offloaded)
            each.setdefault(action, set()).add(row)
        # Chunks alike have the same bytes, so that of weights more can be left out than of counts.
        fullest_of = {action: outer(found) for action, found in each.items()}
        groups += [(place, action) for action in fullest_of]
        sizes += map(len, fullest_of.values())
        left = [(action, row) for action, found in fullest_of.items() for row in found]
        flags = len(moments[0].made)
        own.append((number, halves))
        counts.append(len(fullest_of))
        actions += [(number, action) for action, _ in left]
        rows += [row[flags:] for _, row in left]
        made += [row[:flags] for _, row in left]
    width = max(map(len, rows))
    weights = torch.tensor([row + (0,) * (width - len(row)) for row in rows])
    return Told(own, actions, groups, counts, sizes, weights, made)


class Fullest(NamedTuple):
    """The most bytes of micro-batches under way, of all cuts.

    Attributes:
        ranks: One cut after another.
        width: How many ranks there are.
        by_group: By cut, in each of the ranks' groups.
        message: The largest between stages, by cut.
    """

    ranks: list[int]  # a list for each cut would cost a search a tenth of its time
    width: int
    by_group: Tensor
    message: list[int]

    def of_ranks(self, cut: int) -> list[int]:
        """Return those on each rank."""
        return self.ranks[cut * self.width : (cut + 1) * self.width]

    def of_groups(self, cut: int) -> list[int]:
        """Return those in each group."""
        found: list[int] = self.by_group[cut].tolist()
        return found


def fullest(
    known: Holdings,
    recompute: Recompute,
    rows: int,
    ranks: Told,
    own: Mapping[int, Brought],
    layout: Layout,
) -> Fullest:
    """Return for every cut the most bytes of micro-batches under way.

    Args:
        known: Of the description.
        recompute: What runs again.
        rows: Of a micro-batch.
        ranks: With their moments.
        own: What each rank of a number is brought, which counts too; {} if a step brings nothing.
            Only those of the cut are right then whose gradients these are.
        layout: With that cut.
    """
    sizes = sizes_of(known, recompute, rows)
    column = torch.stack(_column(known, sizes)[: ranks.weights.shape[1]])
    each = {
        action: works(known, sizes, *action, own.get(action[0]), layout)
        for action in {*ranks.actions}
    }
    sums = ranks.weights @ column + torch.stack([each[action] for action in ranks.actions])
    if own:
        there = zip(ranks.actions, ranks.made, strict=True)
        flags = [sum(map(mul, made, own[number].flags)) for (number, _), made in there]
        sums += torch.tensor(flags).unsqueeze(1)
    groups = torch.stack([moments.amax(0) for moments in torch.split(sums, ranks.sizes)])
    found = torch.stack([own.amax(0) for own in torch.split(groups, ranks.counts)])
    if not known.description.early:
        found += torch.stack([_always(known, sizes, number) for number, _ in ranks.ranks])
    message: list[int] = torch.stack(sizes.handed).amax(0).tolist()
    return Fullest(found.T.reshape(-1).tolist(), len(found), groups.T, message)


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
