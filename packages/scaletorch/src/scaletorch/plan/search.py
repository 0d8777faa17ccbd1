"""All layouts of a job, what each costs, and which is the best."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from ..dist.errors import InvalidArgumentError
from .clusters import Cluster
from .description import Description
from .estimate import Estimate, Time
from .fitting import Bounded, Fits, Over, Room, fitting
from .holding import Holdings, Optimizer
from .later import Later
from .layout import Layout
from .memory import Line, lines, ranks_hold
from .options import Options, Refused, legal
from .timing import Timers, timers
from .timing import time as seconds_of
from .traffic import ranks_send

UNKNOWN = -1  # in place of a peak: goes before all whose time is the same
T = TypeVar("T")
Timer = Callable[[Description, Layout, Cluster], Time]


class Sure(NamedTuple):
    """What bounds of peaks tell of layouts.

    Attributes:
        fit: How many of them fit, at the least.
        refused: How many do not, or cannot be: the first of `Plan.refused`.
        open: Of how many others only the peak itself tells.
    """

    fit: int = 0
    refused: int = 0
    open: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The layouts of a job.

    Attributes:
        description: The model.
        cluster: What it would run on.
        optimizer: What is kept for each parameter.
        estimates: Of those that fit, the best first: by time if it is known, else by memory. What
            one costs is worked out when it is looked at, and so is whether it fits where that takes
            long; how many there are only all of them tell.
        refused: The others, and why; that is put into words when it is looked at.
        over: Of these, what takes more memory than there is, the least first, as `estimates`.
        sure: What is known of their numbers before all peaks are.
    """

    description: Description
    cluster: Cluster
    optimizer: Optimizer
    estimates: Sequence[Estimate]
    refused: Sequence[Refused]
    over: Sequence[Estimate]
    sure: Sure

    def best(self) -> Estimate:
        """Return the first estimate.

        Raises:
            InvalidArgumentError: No layout is legal and fits; the message has some reasons.
        """
        if self.estimates:
            return self.estimates[0]
        reasons = dict.fromkeys(f"{each.grid}: {each.why}" for each in self.refused)
        raise InvalidArgumentError(
            f"no layout of {self.cluster.ranks} ranks can train {self.description.name}: "
            + "; ".join(list(reasons)[:3])
        )

    def explain(self, layout: Layout | None = None, rank: int | None = None) -> tuple[Line, ...]:
        """Return the memory of a rank line by line.

        Args:
            layout: Any of the model's; None is the best.
            rank: Of the pipeline; None is the fullest.

        Raises:
            InvalidArgumentError: The model cannot be cut so, or has fewer layers than stages.
        """
        chosen = self.best().layout if layout is None else layout
        return lines(self.description, chosen, rank, self.optimizer)


def plan(
    description: Description,
    rows: int,
    cluster: Cluster,
    *,
    options: Options | None = None,
    optimizer: Optimizer | None = None,
    time: Timer | None = None,
) -> Plan:
    """Return what the layouts of a job cost, the best first.

    All sizes of the grid are tried that the model is described for. Of ZeRO's stages and of
    recomputation a layout has as little as lets it fit, since they cost time: a step further is
    tried only if no step before it fits. `Options` says what is tried of the rest.

    Args:
        description: The model.
        rows: Sequences of a step, of all ranks.
        cluster: Its ranks, and the memory of one.
        options: What is tried.
        optimizer: What is kept for each parameter; by default AdamW.
        time: `time(description, layout, cluster)`, by which they are ranked; None is by memory.

    Raises:
        InvalidArgumentError: No rows, or no ranks.
    """
    with _uncollected():
        return _plan(description, rows, cluster, options or Options(), optimizer, time)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Look for no cycles meanwhile: a search makes none, and very many objects that stay.

    They are not looked at when it ends either: to freeze all that there is and to let it go again
    makes it old, at no cost.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _plan(
    description: Description,
    rows: int,
    cluster: Cluster,
    chosen: Options,
    optimizer: Optimizer | None,
    time: Timer | None,
) -> Plan:
    known = Holdings(description, optimizer)
    room = Room(cluster.device)
    fits, sure = Fits(known, room), 0
    may: list[Bounded] = []
    unsure: list[tuple[Over, list[Bounded]]] = []
    over: list[Over] = []
    refused: list[Refused | Over] = []
    for each in legal(description, rows, cluster.ranks, chosen):
        if isinstance(each, Refused):
            refused.append(each)
            continue
        own, nearest = fitting(known, each, room.left(each), chosen)
        may += own
        if nearest is None:
            sure += _sure(own, room)
        elif own:
            unsure.append((nearest, own))
        else:
            over.append(nearest)
            refused.append(nearest)
    timed = None if time is None else _timers(time, description, cluster)
    least = [0.0 if timed is None else timed.least(own.layout) for own in may]
    estimates = Later(_fitting(fits, may, least, timed))
    estimates[:1]  # the best is found now
    late = Later(near.seen(fits, own) for near, own in unsure if not any(map(fits, own)))
    why = (each.refused(room) if isinstance(each, Over) else each for each in refused)
    return Plan(
        description, cluster, known.optimizer, estimates,
        Later(chain(why, (each.refused(room) for each in late))),
        Later(_by_memory(fits, over, late, timed)),
        Sure(sure, len(refused), len(unsure)),
    )  # fmt: skip


def _sure(own: Sequence[Bounded], room: Room) -> int:
    """Return how many of a layout's ways to fit are there whatever the peaks of the others are."""
    alone = [each for each in own if not each.less and each.bounds.fits(room.left(each.layout))]
    return len(alone) or len(own) > 0


def _timers(time: Timer, description: Description, cluster: Cluster) -> Timers:
    """Return what tells the time of a layout; of another timer than ours no least time is known."""
    if time is seconds_of:
        return timers(description, cluster)
    exact = cache(lambda layout: time(description, layout, cluster))
    return Timers(exact, lambda layout: exact(layout).step)


def _fitting(
    fits: Fits, may: Sequence[Bounded], least: Sequence[float], timed: Timers | None
) -> Iterator[Estimate]:
    """Yield those that fit; of the others no more is worked out than it takes to tell that."""
    for own, spent in _ranked(fits, may, least, timed):
        if fits(own):
            yield _estimate(fits, own.layout, spent)


def _by_memory(
    fits: Fits, over: Sequence[Over], late: Sequence[Over], timed: Timers | None
) -> Iterator[Estimate]:
    """Yield estimates of what does not fit, with the least memory first, and their times."""
    bounded = [each.bounded() for each in (*over, *late)]
    for own, _ in _ranked(fits, bounded, [0.0] * len(bounded), None):
        yield _estimate(fits, own.layout, timed.exact(own.layout) if timed else None)


def _ranked(
    fits: Fits, layouts: Sequence[Bounded], least: Sequence[float], timed: Timers | None
) -> Iterator[tuple[Bounded, Time | None]]:
    """Yield layouts, the best first, and their times; no more is worked out than tells which.

    Args:
        fits: Tells peaks.
        layouts: In any order.
        least: Seconds that each takes at the least.
        timed: By whose times they are ranked, and then by peaks; None is by peaks alone.
    """
    held = [fits.room.held(own.layout) for own in layouts]
    queue = [
        (low, UNKNOWN if timed else own.bounds.least + held[at], at)
        for at, (low, own) in enumerate(zip(least, layouts, strict=True))
    ]
    heapify(queue)
    times: dict[int, Time] = {}
    exact: set[int] = set()
    while queue:
        _, _, at = heappop(queue)
        own = layouts[at]
        if at in exact or not (timed or own.bounds.least != own.bounds.most):
            yield own, times.get(at)
            continue
        exact.add(at)  # if it is the best is seen when its turn comes again
        if timed:
            times[at] = timed.exact(own.layout)
            heappush(queue, (times[at].step, own.bounds.least + held[at], at))
        else:
            heappush(queue, (0.0, fits.peak(own) + held[at], at))


def _estimate(fits: Fits, layout: Layout, spent: Time | None) -> Estimate:
    stages = layout.grid.pp
    held = Later(_when_asked(ranks_hold, fits.known, layout), stages)
    sent = Later(_when_asked(ranks_send, fits.known, layout), stages)
    return Estimate(layout, held, sent, spent, fits.room.held(layout))


def _when_asked(make: Callable[..., Iterable[T]], *arguments: Any) -> Iterator[T]:
    yield from make(*arguments)
