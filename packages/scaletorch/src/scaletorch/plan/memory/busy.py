"""When the ranks of a pipeline may hold the most: what they keep then, and messages under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from operator import add
from typing import NamedTuple

from ..holding import Holdings
from ..holding.live import Counts, Live, enough, halved, most_live, outer
from ..holding.under_way import UnderWay, followed, under_way
from ..layout import Layout
from .running import Action

Pipeline = tuple[str, int, int, int, int]


class Moment(NamedTuple):
    """What a rank has when an action is about to run.

    Attributes:
        action: Its kind and chunk.
        kept: Whole micro-batches by chunk, and halves behind them if there are any.
        counts: The same; then by chunk messages of the size of what it sends on, under way or kept
            until their backward; then those of the size of what it receives. As `Running.sizes`.
    """

    action: Action
    kept: Counts
    counts: Counts


class Busy(NamedTuple):
    """A rank of the pipeline, as far as its bytes go by that.

    Attributes:
        number: Of `known.numbers(layout)`.
        halves: Of `halved`.
        moments: At which it may hold the most.
    """

    number: int
    halves: tuple[bool, ...]
    moments: tuple[Moment, ...]


class Ranks(NamedTuple):
    """The ranks of a pipeline.

    Attributes:
        each: Unlike ones.
        places: For each rank its place in `each`.
    """

    each: tuple[Busy, ...]
    places: tuple[int, ...]


def pipeline_of(layout: Layout) -> Pipeline:
    """Return what tells pipelines apart of which ranks are busy in other ways."""
    schedule, pp, chunks, count = (
        layout.schedule, layout.grid.pp, layout.chunks, layout.micro_batches,
    )  # fmt: skip
    return schedule, pp, chunks, enough(schedule, pp, count, chunks), followed(layout)


def busy(known: Holdings, layout: Layout) -> Ranks:
    """Return the ranks of a layout's pipeline."""
    key = pipeline_of(layout)
    found: Ranks | None = known.busy.get(key)
    if found is None:
        schedule, pp, chunks, count, _ = key
        each = zip(
            known.numbers(layout), halved(schedule, pp, layout.micro_batches),
            most_live(schedule, pp, count, chunks), under_way(layout), strict=True,
        )  # fmt: skip
        ranks = [Busy(n, half, tuple(_moments(live, ways))) for n, half, live, ways in each]
        place = {own: at for at, own in enumerate(dict.fromkeys(ranks))}
        found = known.busy[key] = Ranks(tuple(place), tuple([place[own] for own in ranks]))
    return found


def _moments(live: Live, ways: Sequence[UnderWay]) -> Iterator[Moment]:
    """Yield all moments with messages before them, or before any if that is not followed so far."""
    for kind, chunk, moments in live:
        own = [each for each in ways if (each.kind, each.chunk) == (kind, chunk)] or ways
        found = {}
        for kept, each in product(moments, own):
            sent = map(add, each.forward, each.returning)
            received = map(add, each.backward, each.entering)
            found[(*kept, *map(add, kept, sent), *received)] = kept
        for counts in outer(found):
            yield Moment((kind, chunk), found[counts], counts)
