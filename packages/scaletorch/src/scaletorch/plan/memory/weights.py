"""What ranks have at their moments, as weights on the bytes of kinds of blocks.

A search sums the same moments for cut after cut: the weights are worked out once, and then sums are
taken of all cuts that are asked together. Rounded bytes are whole numbers, so it is those of
`fullest_moment`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from operator import mul
from typing import NamedTuple

from ..gradients.brought import Brought
from ..holding import Holdings
from ..holding.live import Counts, outer
from ..layout import Layout
from .busy import Busy
from .by_cut import most, packed, plus, unpacked
from .sizes import Sizes, Whole, sizes_of
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
        weights: Of each moment: on which of `Sizes.column`, and how much.
        made: Of each moment, as `Moment.made`.
    """

    ranks: list[tuple[int, tuple[bool, ...]]]
    actions: list[tuple[int, Action]]
    groups: list[tuple[int, Action]]
    counts: list[int]
    sizes: list[int]
    weights: list[list[tuple[int, int]]]
    made: list[Counts]


def told(known: Holdings, ranks: Iterable[Busy], *, offloaded: bool) -> Told:
    """Return ranks with their moments as weights; `offloaded`: whether what they receive stays."""
    own: list[tuple[int, tuple[bool, ...]]] = []
    actions: list[tuple[int, Action]] = []
    counts: list[int] = []
    groups: list[tuple[int, Action]] = []
    sizes: list[int] = []
    weights: list[list[tuple[int, int]]] = []
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
        weights += [
            [(at, weight) for at, weight in enumerate(row[flags:]) if weight] for _, row in left
        ]
        made += [row[:flags] for _, row in left]
    return Told(own, actions, groups, counts, sizes, weights, made)


class Fullest(NamedTuple):
    """The most bytes of micro-batches under way, of all cuts that are asked together.

    Attributes:
        by_rank: Of each rank.
        by_group: Of each of the ranks' groups.
        message: The largest between stages.
    """

    by_rank: list[Whole]
    by_group: list[Whole]
    message: Whole

    def of_ranks(self, cut: int) -> list[int]:
        """Return those on each rank."""
        return [own[cut] for own in self.by_rank]

    def of_groups(self, cut: int) -> list[int]:
        """Return those in each group."""
        return [own[cut] for own in self.by_group]


def fullest(known: Holdings, layout: Layout, ranks: Told, own: Mapping[int, Brought]) -> Fullest:
    """Return for every cut the most bytes of micro-batches under way.

    Args:
        known: Of the description.
        layout: With what runs again, the rows of a micro-batch, and one of the cuts.
        ranks: With their moments.
        own: What each rank of a number is brought, which counts too; {} if a step brings nothing.
            Only those of the layout's cut are right then, whose gradients these are.
    """
    sizes = sizes_of(known, layout)
    _complete(known, sizes)
    each = {
        action: packed(works(known, sizes, *action, own.get(action[0]), layout))
        for action in {*ranks.actions}
    }
    column, cuts = sizes.column, len(sizes.handed[0])
    sums = []
    for action, weights, made in zip(ranks.actions, ranks.weights, ranks.made, strict=True):
        together = sum([column[at] * weight for at, weight in weights], each[action])
        now = unpacked(together, cuts)
        if own and (come := sum(map(mul, made, own[action[0]].flags))):
            now = [number + come for number in now]
        sums.append(now)
    moments = iter(sums)
    by_group = [most([*islice(moments, size)]) for size in ranks.sizes]
    groups = iter(by_group)
    by_rank = [most([*islice(groups, count)]) for count in ranks.counts]
    if not known.description.early:
        always = [_always(known, sizes, number) for number, _ in ranks.ranks]
        by_rank = [*map(plus, by_rank, always)]
    return Fullest(by_rank, by_group, most(sizes.handed))


def _always(known: Holdings, sizes: Sizes, number: int) -> Whole:
    content = known.content(number)
    left, entered = (
        most([sizes.handed[kind] for kind in kinds]) for kinds in (content.left, content.entered)
    )
    return plus(left, entered)


def _complete(known: Holdings, sizes: Sizes) -> None:
    """Have all that is weighed: by kinds what they keep, leave and hand on; `shared` of chunks."""
    found, plain = sizes.column, 3 * known.all_kinds + 1
    if not found:
        found += map(packed, [*sizes.kept, *sizes.halves, *sizes.handed])
    for kinds in known.kinds_of_chunks[len(found) - plain :]:
        found.append(packed(most([sizes.shared[kind] for kind in kinds])))


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
