"""All layouts of a job, what each costs, and which is the best."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import Grid, count_communicators
from .clusters import Cluster, Device
from .description import Description
from .estimate import Estimate, Later, Time
from .held import Known, Optimizer
from .layout import Layout, Recompute
from .memory import Line, before, lines, memory, peak
from .options import Options, Refused, ladder, legal
from .timing import Steps, steps_of
from .timing import time as seconds_of
from .traffic import ranks_send
from .units import in_bytes

Timer = Callable[[Description, Layout, Cluster], Time]


@dataclass(frozen=True, slots=True)
class Plan:
    """The layouts of a job.

    Attributes:
        description: The model.
        cluster: What it would run on.
        optimizer: What is kept for each parameter.
        estimates: Of those that fit, the best first: by time if it is known, else by memory.
        refused: The others, and why.
        over: Of these, what takes more memory than there is, the least first, as `estimates`.
    """

    description: Description
    cluster: Cluster
    optimizer: Optimizer
    estimates: Sequence[Estimate]
    refused: Sequence[Refused]
    over: Sequence[Estimate]

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


class Weighed(NamedTuple):
    """A layout and its peak without communicators."""

    peak: int
    layout: Layout


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
    """Look for no cycles meanwhile: a search makes none, and very many objects that stay."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _plan(
    description: Description, rows: int, cluster: Cluster, chosen: Options,
    optimizer: Optimizer | None, time: Timer | None,
) -> Plan:  # fmt: skip
    known, room = Known(description, optimizer), Room(cluster.device)
    fitting: list[Weighed] = []
    over: list[Weighed] = []
    refused: list[Refused] = []
    for each in legal(description, rows, cluster.ranks, chosen):
        if isinstance(each, Refused):
            refused.append(each)
            continue
        found, near = _fitting(known, each, room.left(each.grid), chosen)
        fitting += found
        if near is not None:
            over.append(near.own)
            refused.append(near.refused(room))
    steps = None if time is None else _steps(time, description, cluster)
    return Plan(
        description, cluster, known.optimizer,
        Later(lambda: _ranked(known, fitting, room, steps), len(fitting)), refused,
        Later(lambda: _by_memory(known, over, room, steps), len(over)),
    )  # fmt: skip


def _ranked(
    known: Known, layouts: Sequence[Weighed], room: Room, steps: Steps | None
) -> Iterator[Estimate]:
    """Yield estimates, the best first; no more times are worked out than tells which that is."""
    if steps is None:
        yield from _by_memory(known, layouts, room, None)
        return
    queue = [(steps.least(own.layout), -1, at) for at, own in enumerate(layouts)]
    heapify(queue)
    times: dict[int, Time] = {}
    while queue:
        _, _, at = heappop(queue)
        peak, layout = layouts[at]
        if at in times:
            yield _estimate(known, layout, room, times[at])
        else:  # whether it is the best is seen when its turn comes again
            times[at] = steps.exact(layout)
            heappush(queue, (times[at].step, peak + room.held(layout.grid), at))


def _by_memory(
    known: Known, layouts: Sequence[Weighed], room: Room, steps: Steps | None
) -> Iterator[Estimate]:
    """Yield estimates of layouts, those with the least memory first."""
    for _, layout in sorted(layouts, key=lambda own: own.peak + room.held(own.layout.grid)):
        yield _estimate(known, layout, room, steps.exact(layout) if steps else None)


class Room:
    """The memory of a rank, and what its communicators leave of it."""

    def __init__(self, device: Device) -> None:
        self.memory, self._group = device.memory, device.group_memory
        self._held: dict[Grid, int] = {}

    def held(self, grid: Grid) -> int:
        """Return the bytes of a grid's communicators."""
        if self._group and grid not in self._held:
            self._held[grid] = self._group * count_communicators(grid)
        return self._held.get(grid, 0)

    def left(self, grid: Grid) -> int:
        """Return the bytes for all else."""
        return self.memory - self.held(grid)


class Near(NamedTuple):
    """What of a layout takes the least memory, which is too much.

    Attributes:
        own: The layout with what saves memory, and its peak.
        early: Bytes that are too much before a step; 0 if those are not.
    """

    own: Weighed
    early: int

    def refused(self, room: Room) -> Refused:
        """Return it with the reason."""
        layout, all_ = self.own.layout, in_bytes(room.memory)
        held, how = room.held(layout.grid), f"with zero {layout.zero}"
        if self.early:
            why = f"needs {in_bytes(self.early + held)} of {all_} before a step, {how}"
        else:
            needs = in_bytes(self.own.peak + held)
            why = f"needs {needs} of {all_}, {how} and recompute {layout.recompute}"
        return Refused(layout.grid, why, layout)


def _fitting(
    known: Known, layout: Layout, memory: int, options: Options
) -> tuple[list[Weighed], Near | None]:
    """Return what fits with the least of what saves memory; if nothing does, what is nearest."""
    found: list[Weighed] = []
    steps: list[tuple[int, int]] = []
    near: Weighed | None = None
    for step, recompute, zero in ladder(layout, options, steps):
        own = layout.saving(recompute, zero)
        if not _described(known.description, layout, recompute, own):
            continue
        weighed = Weighed(peak(known, own), own)
        if weighed.peak <= memory:
            found.append(weighed)
            steps.append(step)
        elif near is None or weighed.peak < near.peak:
            near = weighed
    if found or near is None:
        return found, None
    least = before(known, near.layout)
    return [], Near(near, least if least > memory else 0)


def _described(description: Description, layout: Layout, recompute: Recompute, own: Layout) -> bool:
    """Return whether a model is described so: not each cut is with selective recomputation."""
    return (recompute == "selective") == (layout.recompute == "selective") or (
        own.cut in description.cuts
    )


def _steps(time: Timer, description: Description, cluster: Cluster) -> Steps:
    """Return what tells the time of a layout; of another timer than ours no least time is known."""
    if time is seconds_of:
        return steps_of(description, cluster)
    exact = cache(lambda layout: time(description, layout, cluster))
    return Steps(exact, lambda layout: exact(layout).step)


def _estimate(known: Known, layout: Layout, room: Room, time: Time | None) -> Estimate:
    ranks = layout.grid.pp
    return Estimate(
        layout, Later(lambda: memory(known.description, layout, known=known), ranks),
        Later(lambda: ranks_send(known, layout), ranks), time, room.held(layout.grid),
    )  # fmt: skip
