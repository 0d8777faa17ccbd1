"""The search for the best layout of a job."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from itertools import count, islice

from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import count_communicators
from .clusters import Cluster
from .description import Description, Layout
from .estimate import Estimate, in_bytes
from .facts import Facts, Optimizer
from .memory import memory, peak
from .options import Options, Refused, ladder, legal
from .timing import Steps


class Plan:
    """The layouts of a job: a `description`, its `rows` over all ranks, and a `cluster`."""

    def __init__(
        self, description: Description, rows: int, cluster: Cluster, options: Options,
        optimizer: Optimizer | None,
    ) -> None:  # fmt: skip
        self.description, self.rows, self.cluster = description, rows, cluster
        self._facts = Facts(description, optimizer)
        self._steps = Steps(description, cluster, self._facts)
        size = cluster.device.group_memory
        self._communicators = cache(lambda grid: size and size * count_communicators(grid))
        self._peak = cache(
            lambda layout: peak(self._facts, layout) + self._communicators(layout.grid)
        )
        self._search, self._found = self._in_order(), list[Estimate]()
        self._options, self._fitted = options, cache(self._fit)
        found = list(legal(description, rows, cluster.ranks, options))
        self._illegal = [each for each in found if isinstance(each, Refused)]
        self._legal = [each for each in found if isinstance(each, Layout)]

    def _fit(self, layout: Layout) -> tuple[list[Layout], list[Layout]]:
        """Return the variants of a layout that fit with the least savings, and all variants."""
        room = self.cluster.device.memory - self._communicators(layout.grid)
        enough: list[tuple[int, int]] = []
        fitting: list[Layout] = []
        tried: list[Layout] = []
        for (first, second), recompute, zero in ladder(layout.grid, self._options):
            if any(a <= first and b <= second for a, b in enough):  # fewer savings fit already
                continue
            variant = replace(layout, recompute=recompute, zero=zero)
            if variant.cut not in self.description.cuts:  # not described with this recomputation
                continue
            tried.append(variant)
            if peak(self._facts, variant, room) <= room:
                fitting.append(variant)
                enough.append((first, second))
        return fitting, tried

    @cached_property
    def fitting(self) -> list[Layout]:
        """Layouts that fit, in no order."""
        with _uncollected():
            return [variant for layout in self._legal for variant in self._fitted(layout)[0]]

    def ranked(self) -> Iterator[Estimate]:
        """Yield the estimates that fit, fastest first."""
        for number in count():
            if number == len(self._found):
                following = next(self._search, None)
                if following is None:
                    return
                self._found.append(self.estimate(following))
            yield self._found[number]

    def _in_order(self) -> Iterator[Layout]:
        """Yield the layouts that fit, fastest first, from a queue by lower bounds of step times."""
        # At the front, a layout is fitted into memory, then bounded more closely, then simulated.
        floor, close = -2, -1  # kind of lower bound; peak bytes follow an exact time
        queue = [
            (self._steps.floor(layout), floor, (number, 0), layout)
            for number, layout in enumerate(self._legal)
        ]
        heapify(queue)
        while queue:
            _, known, number, layout = heappop(queue)
            if known == floor:
                for variant, own in enumerate(self._fitted(layout)[0]):
                    heappush(queue, (self._steps.least(own), close, (number[0], variant), own))
            elif known == close:
                heappush(queue, (self._steps.step(layout), self._peak(layout), number, layout))
            else:
                yield layout

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
        least = (min(tried, key=self._peak) for tried in self._large)
        return tuple(map(self.estimate, sorted(least, key=self._peak)))

    @cached_property
    def _large(self) -> list[list[Layout]]:
        """All variants of each layout of which none fits."""
        each = map(self._fitted, self._legal)
        return [tried for fitting, tried in each if tried and not fitting]

    @cached_property
    def refused(self) -> tuple[Refused, ...]:
        """Refused grids and layouts, and why."""
        return (*self._illegal, *map(self._too_large, self._large))

    @cached_property
    def reasons(self) -> list[tuple[int, Refused]]:
        """Refused grids, and one layout that does not fit as an example, each with a count."""
        large = [(len(self._large), self._too_large(self._large[0]))] if self._large else []
        return [*((1, each) for each in self._illegal), *large]

    def _too_large(self, tried: list[Layout]) -> Refused:
        layout = min(tried, key=self._peak)
        needed, room = in_bytes(self._peak(layout)), in_bytes(self.cluster.device.memory)
        saved = f"zero {layout.zero} and recompute {layout.recompute}"
        return Refused(layout.grid, f"needs {needed} of {room}, with {saved}", layout)

    def estimate(self, layout: Layout) -> Estimate:
        """Return the cost of a layout.

        Raises:
            InvalidArgumentError: The model cannot have this cut, or has fewer layers than stages.
        """
        held = memory(self.description, layout, facts=self._facts)
        return Estimate(layout, held, self._steps.exact(layout), self._communicators(layout.grid))

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
        reasons = [*dict.fromkeys(f"{each.grid}: {each.why}" for each in self.refused)]
        raise InvalidArgumentError(
            f"no layout of {self.cluster.ranks} ranks can train {self.description.name}: "
            f"{'; '.join(reasons[:3])}"
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
    with _uncollected():
        found = Plan(description, rows, cluster, options or Options(), optimizer)
        _ = found.first  # compute it now
    return found


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage: a search makes no reference cycles, but very many long-lived objects."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
