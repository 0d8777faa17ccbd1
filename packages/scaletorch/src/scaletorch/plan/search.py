"""The search for the best layout of a job."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from itertools import islice

from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import Grid, count_communicators
from .clusters import Cluster
from .description import Description
from .estimate import Estimate
from .known import Known, Optimizer
from .layout import Layout
from .memory import before, memory, peak
from .options import Options, Refused, ladder, legal
from .timing import Steps
from .units import in_bytes

# Sort key after the time of a queued layout: kind of lower bound, or peak bytes if exact.
FLOOR, LEAST = -2, -1


class Plan:
    """The layouts of a job.

    Attributes:
        description: The model.
        rows: Sequences of a step, over all ranks.
        cluster: The cluster it runs on.
        optimizer: State of the optimizer.
        illegal: Grids without a layout, and why.
    """

    def __init__(
        self, description: Description, rows: int, cluster: Cluster, options: Options,
        optimizer: Optimizer | None,
    ) -> None:  # fmt: skip
        self.description, self.rows, self.cluster = description, rows, cluster
        self._known = Known(description, optimizer)
        self.optimizer = self._known.optimizer
        self._steps = Steps(description, cluster, self._known)
        self._peak = cache(lambda layout: peak(self._known, layout) + self._groups(layout.grid))
        self._groups = cache(self._communicators)
        self._time = cache(self._steps.exact)
        self._options = options
        self._fitting = cache(self._try)
        self.illegal: list[Refused] = []
        self._legal: list[Layout] = []
        for each in legal(description, rows, cluster.ranks, options):
            if isinstance(each, Refused):
                self.illegal.append(each)
            else:
                self._legal.append(each)

    def _communicators(self, grid: Grid) -> int:
        size = self.cluster.device.group_memory
        return size * count_communicators(grid) if size else 0

    def _try(self, layout: Layout) -> tuple[list[Layout], list[Layout]]:
        """Return the variants of a layout that fit with the least savings, and all variants."""
        room = self.cluster.device.memory - self._groups(layout.grid)
        found: list[Layout] = []
        tried: list[Layout] = []
        enough: list[tuple[int, int]] = []
        for (recompute, zero), own in ladder(layout, self._options):
            if any(a <= recompute and b <= zero for a, b in enough):  # fewer savings fit already
                continue
            if own.cut not in self.description.cuts:  # not described with this recomputation
                continue
            tried.append(own)
            if peak(self._known, own, room) <= room:
                found.append(own)
                enough.append((recompute, zero))
        return found, tried

    @cached_property
    def fitting(self) -> list[Layout]:
        """Layouts that fit, in no order."""
        return [own for each in self._legal for own in self._fitting(each)[0]]

    @cached_property
    def tried(self) -> list[list[Layout]]:
        """For each layout that does not fit, the variants that were tried."""
        each = map(self._fitting, self._legal)
        return [tried for found, tried in each if tried and not found]

    def ranked(self) -> Iterator[Estimate]:
        """Yield the estimates that fit, fastest first.

        Layouts wait in a queue by a lower bound of their step time, which is refined when they
        reach the front. So only as many layouts are fitted into memory and simulated as needed to
        find the next best.
        """
        steps = self._steps
        queue = [(steps.floor(each), FLOOR, (at, 0), each) for at, each in enumerate(self._legal)]
        heapify(queue)
        while queue:
            _, stage, at, layout = heappop(queue)
            if stage == FLOOR:
                for way, own in enumerate(self._fitting(layout)[0]):
                    heappush(queue, (steps.least(own), LEAST, (at[0], way), own))
            elif stage == LEAST:
                heappush(queue, (self._time(layout).step, self._peak(layout), at, layout))
            else:
                yield self.estimate(layout)

    def top(self, count: int) -> list[Estimate]:
        """Return the best layouts that fit, or the ones nearest to fitting if none does."""
        return list(islice(self.ranked(), count)) or list(self.over[:count])

    @cached_property
    def estimates(self) -> tuple[Estimate, ...]:
        """All estimates that fit, fastest first."""
        return tuple(self.ranked())

    @cached_property
    def over(self) -> tuple[Estimate, ...]:
        """The smallest estimate of each layout that does not fit, by increasing memory."""
        return tuple(map(self.estimate, sorted(map(self._nearest, self.tried), key=self._peak)))

    @cached_property
    def refused(self) -> tuple[Refused, ...]:
        """Refused grids and layouts, and why."""
        full = [Refused(own.grid, self._why(own), own) for own in map(self._nearest, self.tried)]
        return (*self.illegal, *full)

    def _nearest(self, tried: Sequence[Layout]) -> Layout:
        return min(tried, key=self._peak)

    def _why(self, layout: Layout) -> str:
        """Return the reason why a layout needs too much memory."""
        room, how = self.cluster.device.memory, f"with zero {layout.zero}"
        early = before(self._known, layout) + self._groups(layout.grid)
        if early > room:
            return f"needs {in_bytes(early)} of {in_bytes(room)} before a step, {how}"
        needs = in_bytes(self._peak(layout))
        return f"needs {needs} of {in_bytes(room)}, {how} and recompute {layout.recompute}"

    def estimate(self, layout: Layout) -> Estimate:
        """Return the cost of a layout.

        Raises:
            InvalidArgumentError: The model cannot have this cut, or has fewer layers than stages.
        """
        held = memory(self.description, layout, known=self._known)
        return Estimate(layout, held, self._time(layout), self._groups(layout.grid))

    @cached_property
    def first(self) -> Estimate | None:
        """The fastest estimate that fits, or None."""
        return next(self.ranked(), None)

    def best(self) -> Estimate:
        """Return the fastest estimate that fits.

        Raises:
            InvalidArgumentError: No layout is legal and fits; the message has up to three reasons.
        """
        if self.first is not None:
            return self.first
        reasons = dict.fromkeys(f"{each.grid}: {each.why}" for each in self.refused)
        raise InvalidArgumentError(
            f"no layout of {self.cluster.ranks} ranks can train {self.description.name}: "
            + "; ".join(list(reasons)[:3])
        )


def plan(
    description: Description,
    rows: int,
    cluster: Cluster,
    *,
    options: Options | None = None,
    optimizer: Optimizer | None = None,
) -> Plan:
    """Plan a job: estimate all layouts and rank those that fit by step time.

    All grid sizes that the model is described for are tried. Recomputation and ZeRO cost time, so a
    layout gets as little of both as it needs to fit: more is tried only if less does not fit.
    `Options` sets the other choices.

    Args:
        description: The model.
        rows: Sequences of a step, over all ranks.
        cluster: The ranks and their memory.
        options: The choices to try.
        optimizer: State of the optimizer; AdamW's by default.

    Raises:
        InvalidArgumentError: No rows, no ranks, or no figure of the device for the model's dtype.
    """
    collecting = gc.isenabled()
    gc.disable()  # a search makes no reference cycles, but very many long-lived objects
    try:
        found = Plan(description, rows, cluster, options or Options(), optimizer)
        _ = found.first  # compute it now
    finally:
        if collecting:
            gc.enable()
    return found
