"""All layouts of a job, what each costs, and which is the best."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar

from ..dist.errors import InvalidArgumentError
from .clusters import Cluster
from .description import Description
from .estimate import Estimate, Time
from .fitting import Bounded, Over, fitting
from .holding import Holdings, Optimizer
from .later import Later
from .layout import Layout
from .memory import Line, exactly, lines, ranks_hold
from .options import Options, Refused, legal
from .timing import Timers, timers
from .timing import time as seconds_of
from .traffic import ranks_send

UNKNOWN = -1  # in place of a peak: goes before all whose time is the same
T = TypeVar("T")
Timer = Callable[[Description, Layout, Cluster], Time]


@dataclass(frozen=True, slots=True)
class Plan:
    """The layouts of a job.

    Attributes:
        description: The model.
        cluster: What it would run on.
        optimizer: What is kept for each parameter.
        estimates: Of those that fit, the best first: by time if it is known, else by memory. What
            one costs is worked out when it is looked at.
        refused: The others, and why; that is put into words when it is looked at.
        over: Of these, what takes more memory than there is, the least first, as `estimates`.
    """

    description: Description
    cluster: Cluster
    optimizer: Optimizer
    estimates: Sequence[Estimate]
    refused: Sequence[Refused]
    over: Sequence[Estimate] = ()

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
    memory = cluster.device.memory
    fit: list[Bounded] = []
    over: list[Over] = []
    refused: list[Refused | Over] = []
    for each in legal(description, rows, cluster.ranks, chosen):
        if isinstance(each, Refused):
            refused.append(each)
        else:
            own, nearest = fitting(known, each, memory, chosen)
            fit += own
            if nearest is not None:
                over.append(nearest)
                refused.append(nearest)
    timed = None if time is None else _timers(time, description, cluster)
    least = [0.0 if timed is None else timed.least(layout) for _, layout in fit]
    estimates = Later(len(fit), _ranked(known, fit, least, timed))
    estimates[:1]  # the best is found now
    others = Later(len(over), _by_memory(known, over, timed))
    why = Later(len(refused), (o.refused(memory) if isinstance(o, Over) else o for o in refused))
    return Plan(description, cluster, known.optimizer, estimates, why, others)


def _timers(time: Timer, description: Description, cluster: Cluster) -> Timers:
    """Return what tells the time of a layout; of another timer than ours no least time is known."""
    if time is seconds_of:
        return timers(description, cluster)
    exact = cache(lambda layout: time(description, layout, cluster))
    return Timers(exact, lambda layout: exact(layout).step)


def _ranked(
    known: Holdings,
    fit: Sequence[Bounded],
    least: Sequence[float],
    timed: Timers | None,
) -> Iterator[Estimate]:
    """Yield estimates, the best first; no more is worked out than it takes to tell which.

    Args:
        known: Of the description.
        fit: Bounds of peaks, and layouts.
        least: Seconds that each layout takes at the least.
        timed: By whose times they are ranked, and then by peaks; None is by peaks alone.
    """
    queue = [
        (low, UNKNOWN if timed else own[0].least, at)
        for at, (low, own) in enumerate(zip(least, fit, strict=True))
    ]
    heapify(queue)
    times: dict[int, Time] = {}
    exact: set[int] = set()
    while queue:
        _, _, at = heappop(queue)
        bounds, layout = fit[at]
        if at not in exact and (
            timed or bounds.least != bounds.most
        ):  # if it is the best is seen then
            exact.add(at)
            if timed:
                times[at] = timed.exact(layout)
                heappush(queue, (times[at].step, bounds.least, at))
            else:
                heappush(queue, (0.0, exactly(known, layout, bounds), at))
        else:
            stages = layout.grid.pp
            held = Later(stages, _when_asked(ranks_hold, known, layout))
            sent = Later(stages, _when_asked(ranks_send, known, layout))
            yield Estimate(layout, held, sent, times.get(at))


def _by_memory(known: Holdings, over: Sequence[Over], timed: Timers | None) -> Iterator[Estimate]:
    """Yield estimates with the least memory first, and their times."""
    bounded = [each.bounded() for each in over]
    for each in _ranked(known, bounded, [0.0] * len(over), None):
        yield replace(each, time=timed.exact(each.layout)) if timed else each


def _when_asked(make: Callable[..., Iterable[T]], *arguments: Any) -> Iterator[T]:
    yield from make(*arguments)
