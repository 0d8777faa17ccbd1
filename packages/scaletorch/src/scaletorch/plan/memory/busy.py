"""When the ranks of a pipeline may hold the most: what they keep then, and messages under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, product
from operator import add
from typing import NamedTuple

from ..gradients.brought import Bringing, brings, most_brought
from ..holding import Holdings
from ..holding.live import SPLIT, Counts, During, halved, most_live, outer
from ..holding.repeating import LONG, enough, followed
from ..holding.under_way import UnderWay, at_last, under_way
from ..layout import Layout
from .working import Action

Pipeline = tuple[str, int, int, int, int, str]  # the last is of `brings`


class Moment(NamedTuple):
    """What a rank has while an action runs.

    Attributes:
        action: Its kind and chunk, and whether it brings gradients.
        kept: Whole micro-batches by chunk, and halves behind them if there are any.
        counts: The same; then by chunk messages of the size of what it sends on, under way or kept
            until their backward; then those of the size of what it receives. As `Running.sizes`.
        made: Which gradients are there, as `Bringing.moments`; () if all are at any time.
    """

    action: Action
    kept: Counts
    counts: Counts
    made: Counts = ()


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


def pipeline_of(known: Holdings, layout: Layout) -> Pipeline:
    """Return what tells pipelines apart of which ranks are busy in other ways."""
    return pipeline_with(layout, brings(known, layout))


def pipeline_with(layout: Layout, brought: str) -> Pipeline:
    """Return `pipeline_of`, whatever the layout itself brings."""
    pp, chunks, count = layout.grid.pp, layout.chunks, layout.micro_batches
    return _pipeline(layout.schedule, pp, chunks, count, brought)


@cache
def _pipeline(schedule: str, pp: int, chunks: int, count: int, brought: str) -> Pipeline:
    if brought:
        return schedule, pp, chunks, count, count, brought
    sent = followed(schedule, min(pp, LONG), count)
    return schedule, pp, chunks, enough(schedule, pp, count), sent, brought


def busy(known: Holdings, layout: Layout, pipeline: Pipeline | None = None) -> Ranks:
    """Return the ranks of a layout's pipeline, or of one that brings other gradients."""
    key = pipeline or pipeline_of(known, layout)
    found: Ranks | None = known.busy.get(key)
    if found is None:
        schedule, pp, *_, brought = key
        each = zip(
            known.numbers(layout), halved(schedule, pp, layout.micro_batches),
            _all_live(layout, brought), under_way(layout), strict=True,
        )  # fmt: skip
        ranks = [Busy(n, half, tuple(_moments(live, ways))) for n, half, live, ways in each]
        place = {own: at for at, own in enumerate(dict.fromkeys(ranks))}
        found = known.busy[key] = Ranks(tuple(place), tuple([place[own] for own in ranks]))
    return found


def busy_at_last(known: Holdings, layout: Layout) -> tuple[Busy, ...]:
    """Return the ranks of a layout's pipeline, each with its last backward alone."""
    numbers, schedule, pp = known.numbers(layout), layout.schedule, layout.grid.pp
    each = zip(numbers, halved(schedule, pp, layout.micro_batches), at_last(layout), strict=True)
    return tuple([Busy(n, half, (_last(own, schedule in SPLIT),)) for n, half, own in each])


def _last(own: UnderWay, split: bool) -> Moment:
    chunks = len(own.forward)
    kept = [0] * (2 * chunks if split else chunks)
    kept[own.chunk + chunks * (own.kind == "W")] = 1
    counts = *kept, *_messages(tuple(kept), tuple(chain(*own[2:])))
    return Moment((own.kind, own.chunk, False), tuple(kept), counts)


def _all_live(layout: Layout, brought: str) -> Sequence[Sequence[During | Bringing]]:
    if brought:
        return most_brought(layout, brought)
    return most_live(layout.schedule, layout.grid.pp, layout.micro_batches, layout.chunks)


def _moments(live: Sequence[During | Bringing], ways: Sequence[UnderWay]) -> Iterator[Moment]:
    """Yield all moments with messages then, or at any if that is not followed so far."""
    for each in live:
        action: Action = each.kind, each.chunk, False
        if isinstance(each, Bringing):
            action, moments = (*action[:2], each.brings), each.moments
        else:
            own = [way for way in ways if (way.kind, way.chunk) == action[:2]] or ways
            moments = tuple(
                (kept, (), tuple(chain(*way[2:]))) for kept, way in product(each.moments, own)
            )
        found = {}
        for kept, made, messages in moments:
            counts = (*kept, *_messages(kept, messages))
            found[(*counts, *made)] = kept, counts, made
        for counts in outer(found):
            yield Moment(action, *found[counts])


def _messages(kept: Counts, messages: Counts) -> Iterator[int]:
    """Yield those of the size of what is sent, with what is kept of it, and of what comes."""
    chunks = len(messages) // 4
    forward, backward, entering, returning = (
        messages[at : at + chunks] for at in range(0, 4 * chunks, chunks)
    )
    yield from map(add, kept, map(add, forward, returning))
    yield from map(add, backward, entering)
