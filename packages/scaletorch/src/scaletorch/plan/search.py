"""All layouts of a job, what each costs, and which is the best."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush

from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import Grid, count_communicators
from .clusters import Cluster, Device
from .description import Description
from .estimate import Estimate, Later, Time
from .held import Known, Optimizer
from .layout import Layout, Recompute
from .memory import Line, before, lines, memory, peak
from .options import Options, Refused, ladder, legal
from .timing import Steps
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
    fitting: list[Layout] = []
    over: list[list[Layout]] = []
    refused: list[Refused | list[Layout]] = []
    for each in legal(description, rows, cluster.ranks, chosen):
        if isinstance(each, Refused):
            refused.append(each)
            continue
        found, tried = _fitting(known, each, room.left(each.grid), chosen)
        fitting += found
        if not found and tried:
            over.append(tried)
            refused.append(tried)
    steps = None
    if time is not None:
        ours = time is seconds_of
        steps = Steps(description, cluster) if ours else _Told(time, description, cluster)
    peaks = Peaks(known, room)
    estimates = Later(lambda: _ranked(peaks, fitting, steps), len(fitting))
    estimates[:1]  # the best is found now
    return Plan(
        description, cluster, known.optimizer, estimates,
        Later(lambda: (_refused(peaks, each) for each in refused), len(refused)),
        Later(lambda: _by_memory(peaks, map(peaks.nearest, over), steps), len(over)),
    )  # fmt: skip


def _fitting(
    known: Known, layout: Layout, memory: int, options: Options
) -> tuple[list[Layout], list[Layout]]:
    """Return what fits with the least of what saves memory, and all that was tried."""
    found: list[Layout] = []
    tried: list[Layout] = []
    steps: list[tuple[int, int]] = []
    for step, recompute, zero in ladder(layout, options, steps):
        own = layout.saving(recompute, zero)
        if _described(known.description, layout, recompute, own):
            tried.append(own)
            if peak(known, own, memory) <= memory:
                found.append(own)
                steps.append(step)
    return found, tried


def _ranked(peaks: Peaks, layouts: Sequence[Layout], steps: Steps | None) -> Iterator[Estimate]:
    """Yield estimates, the best first; no more times are worked out than tells which that is."""
    if steps is None:
        yield from _by_memory(peaks, layouts, None)
        return
    queue = [(steps.least(layout), -1, at) for at, layout in enumerate(layouts)]
    heapify(queue)
    while queue:
        _, held, at = heappop(queue)
        layout = layouts[at]
        if held >= 0:
            yield _estimate(peaks, layout, steps.exact(layout))
        else:  # whether it is the best is seen when its turn comes again
            heappush(queue, (steps.step(layout), peaks.of(layout), at))


def _by_memory(peaks: Peaks, layouts: Iterable[Layout], steps: Steps | None) -> Iterator[Estimate]:
    """Yield estimates of layouts, those with the least memory first."""
    for layout in sorted(layouts, key=peaks.of):
        yield _estimate(peaks, layout, steps.exact(layout) if steps else None)


def _refused(peaks: Peaks, found: Refused | list[Layout]) -> Refused:
    """Return why all that was tried of a layout takes too much, if that is not known yet."""
    if isinstance(found, Refused):
        return found
    layout, room = peaks.nearest(found), peaks.room
    all_, how = in_bytes(room.memory), f"with zero {layout.zero}"
    early = before(peaks.known, layout) + room.held(layout.grid)
    if early > room.memory:
        why = f"needs {in_bytes(early)} of {all_} before a step, {how}"
    else:
        needs = in_bytes(peaks.of(layout))
        why = f"needs {needs} of {all_}, {how} and recompute {layout.recompute}"
    return Refused(layout.grid, why, layout)


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


class Peaks:
    """The most that ranks of layouts hold, each worked out once."""

    def __init__(self, known: Known, room: Room) -> None:
        self.known, self.room = known, room
        self._found: dict[Layout, int] = {}

    def of(self, layout: Layout) -> int:
        """Return the bytes of the fullest rank, its communicators included."""
        if layout not in self._found:
            self._found[layout] = peak(self.known, layout) + self.room.held(layout.grid)
        return self._found[layout]

    def nearest(self, layouts: Sequence[Layout]) -> Layout:
        """Return which one takes the least."""
        return min(layouts, key=self.of)


def _described(description: Description, layout: Layout, recompute: Recompute, own: Layout) -> bool:
    """Return whether a model is described so: not each cut is with selective recomputation."""
    return (recompute == "selective") == (layout.recompute == "selective") or (
        own.cut in description.cuts
    )


class _Told(Steps):
    """Times as a timer of somebody else's tells them: no least one is known."""

    def __init__(self, time: Timer, description: Description, cluster: Cluster) -> None:
        self._time = cache(lambda layout: time(description, layout, cluster))

    def exact(self, layout: Layout) -> Time:
        """Return the time of a step."""
        return self._time(layout)

    def step(self, layout: Layout) -> float:
        """Return the seconds of a step."""
        return self._time(layout).step

    least = step


def _estimate(peaks: Peaks, layout: Layout, time: Time | None) -> Estimate:
    ranks, known = layout.grid.pp, peaks.known
    return Estimate(
        layout, Later(lambda: memory(known.description, layout, known=known), ranks),
        Later(lambda: ranks_send(known, layout), ranks), time, peaks.room.held(layout.grid),
    )  # fmt: skip
