"""What a rank has at a moment, as weights on the bytes of kinds of blocks.

A search sums the same moments for cut after cut: the weights are worked out once, and then a sum is
all that is left. Rounded bytes are whole numbers, so it is the sum of `fullest_moment`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from operator import itemgetter, mul
from typing import NamedTuple

from ..holding import Holdings
from ..holding.brought import Brought
from ..holding.live import Counts, outer
from ..layout import Layout
from .busy import Busy
from .running import Action, Runs, Sizes, sizes_of, works

Weights = tuple[int, ...]


class Weighed(NamedTuple):
    """The moments of a rank at actions of one sort.

    Attributes:
        action: The action.
        moments: Weights on what is `picked` of `_column`, and behind it on gradients brought.
    """

    action: Action
    moments: list[Weights]


class Told(NamedTuple):
    """A rank of the pipeline with its moments as weights.

    Attributes:
        number: As `Busy`.
        halves: As `Busy`.
        runs: The blocks of its chunks.
        picked: Returns that of a column which its moments weigh.
        actions: Its moments.
    """

    number: int
    halves: tuple[bool, ...]
    runs: tuple[Runs, ...]
    picked: Callable[[Sequence[int]], Sequence[int]]
    actions: tuple[Weighed, ...]


def told(known: Holdings, busy: Busy, *, offloaded: bool) -> Told:
    """Return a rank with its moments as weights; `offloaded` is whether what it receives stays."""
    each: dict[Action, list[tuple[Weights, Counts]]] = {}
    for action, _, counts, made in busy.moments:
        weights = _weights(known, busy.number, counts, offloaded)
        each.setdefault(action, []).append((weights, made))
    some = [any(own) for own in zip(*(w for w, _ in chain(*each.values())), strict=True)]
    picked = itemgetter(0, *compress(range(1, len(some)), some[1:]))
    # Chunks alike have the same bytes, so that of weights more can be left out than of counts.
    actions = tuple(
        Weighed(action, outer({(*picked(weights), *made) for weights, made in moments}))
        for action, moments in each.items()
    )
    return Told(busy.number, busy.halves, known.runs(busy.number), picked, actions)


def fullest(
    known: Holdings, layout: Layout, ranks: Iterable[tuple[Told, Brought | None]]
) -> list[int]:
    """Return the most bytes of micro-batches under way on each rank, and of what it is brought."""
    sizes, early = sizes_of(known, layout), known.description.early
    found = []
    for (number, _, _, picked, actions), own in ranks:
        column = (*picked(_column(known, sizes)), *(own.flags if own else ()))
        each = []
        for action, moments in actions:
            most = max([sum(map(mul, weights, column)) for weights in moments])
            each.append(most + works(known, layout, sizes, number, action, own))
        found.append(max(each) if early else max(each) + _always(known, sizes, number))
    return found


def _always(known: Holdings, sizes: Sizes, number: int) -> int:
    content = known.content(number)
    return sum(
        max(sizes.handed[kind] for kind in kinds) for kinds in (content.left, content.entered)
    )


def _column(known: Holdings, sizes: Sizes) -> list[int]:
    """Return what is weighed: by kinds what they keep, leave and hand on; `shared` of chunks."""
    found, plain = sizes.column, 3 * known.all_kinds + 1
    if not found:
        found += [*sizes.kept, *sizes.halves, *sizes.handed]
    for kinds in known.kinds_of_chunks[len(found) - plain :]:
        found.append(max([sizes.shared[kind] for kind in kinds]))
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
