"""When the ranks of a pipeline may hold the most: what they keep then, and messages under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from operator import add, mul
from typing import NamedTuple

from ..holding import Holdings
from ..holding.live import Live, enough, halved, most_live
from ..holding.under_way import UnderWay, followed, under_way
from ..layout import Layout
from .running import Running

Counts = tuple[int, ...]  # by chunk
Pipeline = tuple[str, int, int, int, int]


class Moment(NamedTuple):
    """What a rank has when an action is about to run.

    Attributes:
        action: Its kind and chunk.
        kept: Whole micro-batches by chunk, and halves behind them if there are any.
        sent: Messages under way of the size of what a chunk sends on, by chunk.
        received: Those of the size of what it receives.
    """

    action: tuple[str, int]
    kept: Counts
    sent: Counts
    received: Counts


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


class Held(NamedTuple):
    """Bytes at a moment.

    Attributes:
        kept: By autograd, and by halves of backwards.
        working: While the action runs.
        passed: Of messages that are kept until their backward.
        messages: Of others.
        moment: That.
    """

    kept: int
    working: int
    passed: int
    messages: int
    moment: Moment


def pipeline_of(layout: Layout) -> Pipeline:
    """Return what tells pipelines apart of which ranks are busy in other ways."""
    schedule, pp, chunks, count = (
        layout.schedule, layout.grid.pp, layout.chunks, layout.micro_batches,
    )  # fmt: skip
    return schedule, pp, chunks, enough(schedule, pp, count, chunks), followed(layout)


def busy(known: Holdings, layout: Layout) -> tuple[Busy, ...]:
    """Return the ranks of a layout's pipeline."""
    key = pipeline_of(layout)
    found: tuple[Busy, ...] | None = known.busy.get(key)
    if found is None:
        schedule, pp, chunks, count, _ = key
        each = zip(
            known.numbers(layout), halved(schedule, pp, layout.micro_batches),
            most_live(schedule, pp, count, chunks), under_way(layout), strict=True,
        )  # fmt: skip
        found = known.busy[key] = tuple(
            Busy(number, halves, tuple(_moments(live, ways))) for number, halves, live, ways in each
        )
    return found


def _moments(live: Live, ways: Sequence[UnderWay]) -> Iterator[Moment]:
    """Yield all moments with messages before them, or before any if that is not followed so far."""
    for kind, chunk, moments in live:
        own = [each for each in ways if (each.kind, each.chunk) == (kind, chunk)] or ways
        for kept, each in product(moments, own):
            sent = tuple(map(add, each.forward, each.returning))
            received = tuple(map(add, each.backward, each.entering))
            yield Moment((kind, chunk), kept, sent, received)


def held_at(own: Running, moment: Moment, *, early: bool) -> Held:
    """Return the bytes at a moment; `early` is that of the description."""
    messages = max(own.sent) + max(own.received)
    if early:
        messages = _bytes(moment.sent, own.sent) + _bytes(moment.received, own.received)
    kept, passed = _bytes(moment.kept, own.kept), _bytes(moment.kept, own.passed)
    return Held(kept, own.working[moment.action], passed, messages, moment)


def _bytes(counts: Counts, sizes: Sequence[int]) -> int:
    return sum(map(mul, counts, sizes))  # no halves are passed


def fullest_moment(known: Holdings, own: Running, place: Busy) -> Held:
    """Return the bytes of micro-batches under way when they are the most."""
    early = known.description.early
    return max(
        (held_at(own, moment, early=early) for moment in place.moments),
        key=lambda each: sum(each[:4]),
    )
