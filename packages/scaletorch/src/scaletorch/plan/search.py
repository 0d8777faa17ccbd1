"""All layouts of a job, the cost of each, and the best one."""

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

# How exact the time is by which a layout waits in the queue of a search; if exact, its bytes.
FLOOR, LEAST = -2, -1


class Plan:
    """The layouts of a job.

    Attributes:
        description: The model.
        rows: Sequences of a step, of all ranks.
        cluster: The ranks that it would run on.
        optimizer: The state that is kept for each parameter.
        illegal: Grids that have no layout, and why.
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
        """Return what fits with the least that saves memory of a layout, and all that was tried."""
        room = self.cluster.device.memory - self._groups(layout.grid)
        found: list[Layout] = []
        tried: list[Layout] = []
        enough: list[tuple[int, int]] = []
        for (recompute, zero), own in ladder(layout, self._options):
            if any(a <= recompute and b <= zero for a, b in enough):  # a step before it fits
                continue
            if own.cut not in self.description.cuts:  # with selective recomputation, or without
                continue
            tried.append(own)
            if peak(self._known, own, room) <= room:
                found.append(own)
                enough.append((recompute, zero))
        return found, tried

    @cached_property
    def fitting(self) -> list[Layout]:
        """Return the layouts that fit, in no order."""
        return [own for each in self._legal for own in self._fitting(each)[0]]

    @cached_property
    def tried(self) -> list[list[Layout]]:
        """Return of each layout that does not fit all ways of saving memory that were tried."""
        each = map(self._fitting, self._legal)
        return [tried for found, tried in each if tried and not found]

    def ranked(self) -> Iterator[Estimate]:
        """Yield what fits, the quickest first.

        No more layouts are fitted into memory, and no more steps simulated, than tell which is the
        next best: each waits in a queue by a time that it takes at the least, ever more exact.
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
        """Return the best layouts that fit, or if none does those nearest to it."""
        return list(islice(self.ranked(), count)) or list(self.over[:count])

    @cached_property
    def estimates(self) -> tuple[Estimate, ...]:
        """Return all that fits, the best first."""
        return tuple(self.ranked())

    @cached_property
    def over(self) -> tuple[Estimate, ...]:
        """Return what takes more memory than there is, the least first."""
        return tuple(map(self.estimate, sorted(map(self._nearest, self.tried), key=self._peak)))

    @cached_property
    def refused(self) -> tuple[Refused, ...]:
        """Return grids and layouts that cannot be taken, and why."""
        full = [Refused(own.grid, self._why(own), own) for own in map(self._nearest, self.tried)]
        return (*self.illegal, *full)

    def _nearest(self, tried: Sequence[Layout]) -> Layout:
        return min(tried, key=self._peak)

    def _why(self, layout: Layout) -> str:
        """Return why a layout takes too much memory."""
        room, how = self.cluster.device.memory, f"with zero {layout.zero}"
        early = before(self._known, layout) + self._groups(layout.grid)
        if early > room:
            return f"needs {in_bytes(early)} of {in_bytes(room)} before a step, {how}"
        needs = in_bytes(self._peak(layout))
        return f"needs {needs} of {in_bytes(room)}, {how} and recompute {layout.recompute}"

    def estimate(self, layout: Layout) -> Estimate:
        """Return what a layout costs.

        Raises:
            InvalidArgumentError: The model cannot be cut so, or has fewer layers than stages.
        """
        held = memory(self.description, layout, known=self._known)
        return Estimate(layout, held, self._time(layout), self._groups(layout.grid))

    @cached_property
    def first(self) -> Estimate | None:
        """Return the best of what fits, if anything does."""
        return next(self.ranked(), None)

    def best(self) -> Estimate:
        """Return the first estimate.

        Raises:
            InvalidArgumentError: No layout is legal and fits; the message has some reasons.
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
    """Return the layouts of a job and what they cost, ranked by the time of a step.

    All sizes of the grid are tried that the model is described for. Of ZeRO's stages and of
    recomputation a layout has as little as lets it fit, since they cost time: a step further is
    tried only if no step before it fits. `Options` says what is tried of the rest.

    Args:
        description: The model.
        rows: Sequences of a step, of all ranks.
        cluster: Its ranks, and the memory of one.
        options: What is tried.
        optimizer: What is kept for each parameter; by default AdamW.

    Raises:
        InvalidArgumentError: No rows, no ranks, or no figure of the device for the model's dtype.
    """
    collecting = gc.isenabled()
    gc.disable()  # a search makes no cycles, and very many objects that stay
    try:
        found = Plan(description, rows, cluster, options or Options(), optimizer)
        _ = found.first  # worked out now
    finally:
        if collecting:
            gc.enable()
    return found
