"""Seconds of a step of a layout on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

from ...parallel.pipeline_parallel import Timeline
from ..clusters import Cluster
from ..description import Description
from ..estimate import Time
from ..held import Known
from ..layout import Layout
from ..stages import SPLIT, schedule_of, stages_of
from .blocks import INNER, Kind, Spends, kinds_of, summed
from .ends import Ended, ended
from .messages import Route, route, seconds
from .pipelines import Stage, ends, simulated

OUTER = ("pp", "cp_dp", "edp")  # axes outside of blocks
WORLD = "tp_cp_pp_dp"
# All-reduces of a few numbers in each step: tokens are counted, ranks agree, losses are summed.
CONTROL = {WORLD: 1, "pp": 2, "cp_dp": 2}
SURE = 0.97  # of a bound, since ratios of times are rounded before a schedule is simulated


class Rank(NamedTuple):
    """A rank of the pipeline, for a micro-batch, and the seconds that follow its pipeline."""

    stages: list[Stage]
    kinds: list[tuple[Kind, int]]
    end: Ended
    after: float

    @property
    def computing(self) -> float:
        """Without messages."""
        return sum(n * (k.forward.computing + k.backward.computing) for k, n in self.kinds)


def time(description: Description, layout: Layout, cluster: Cluster) -> Time:
    """Return how long a step takes: forward, backward and update of a global batch.

    Computing is a roofline of each block's operations with the shares of the peaks that the device
    reaches; messages are alpha-beta by the links that a group crosses; the pipeline is its
    schedule, simulated. `low` and `high` are the step if computing is off by the device's `spread`
    either way, and for `high` if nothing of what is taken to hide does: no bounds, but what the
    estimate is least sure of.

    Offloading (`recompute="offload"`) is taken to hide behind computing.

    Args:
        description: Of the model.
        layout: Of `layout.grid.world_size` ranks.
        cluster: With so many at least.

    Raises:
        InvalidArgumentError: The model is not described so, or cannot be cut so; or the device has
            no figure for its dtype.
    """
    return Steps(description, cluster).exact(layout)


def timer(description: Description, cluster: Cluster) -> Callable[[Layout], Time]:
    """Return `time` for many layouts of one model: what they share is worked out once."""
    return Steps(description, cluster).exact


def timeline(description: Description, layout: Layout, cluster: Cluster) -> Timeline:
    """Return when each rank of the pipeline computes what in a step, in seconds.

    Without gradients' sums and the update, which come after it.

    Args:
        description: Of the model.
        layout: Of `layout.grid.world_size` ranks.
        cluster: With so many at least.

    Raises:
        InvalidArgumentError: As `time`.
    """
    times = Steps(description, cluster)
    stages = times.stages(layout, times.ranks(layout))
    return simulated(schedule_of(layout), stages, times.message(layout))


class Steps:
    """Times of layouts of one model on a cluster: what they share is worked out once."""

    def __init__(self, description: Description, cluster: Cluster) -> None:
        self._description, self._cluster = description, cluster
        self._known = Known(description)
        self._spends: Spends = {}
        self._kinds: dict[tuple[object, ...], list[Kind]] = {}
        self._ranks: dict[tuple[object, ...], Rank] = {}
        self._messages: dict[tuple[object, ...], float] = {}
        self._routes = cache(
            lambda grid: {a: route(grid, a, cluster) for a in (*INNER, *OUTER, WORLD)}
        )

    def ranks(self, layout: Layout) -> list[Rank]:
        """Return what the ranks of the pipeline take; equal ones are worked out once."""
        ways = self._routes(layout.grid)
        key = layout.cut, layout.micro_rows, layout.recompute, *(ways[axis] for axis in INNER)
        rounds = layout.micro_batches if layout.zero >= 2 else 1
        own = (*key, layout.zero, rounds, *(ways[axis] for axis in OUTER))
        numbers = self._known.numbers(layout)
        for number in {*numbers}:
            if (number, *own) not in self._ranks:
                if key not in self._kinds:
                    self._kinds[key] = kinds_of(
                        self._description, layout, self._cluster, ways, self._spends
                    )
                self._ranks[number, *own] = self._rank(layout, self._kinds[key], number, ways)
        return [self._ranks[number, *own] for number in numbers]

    def _rank(
        self, layout: Layout, kinds: list[Kind], number: int, ways: Mapping[str, Route]
    ) -> Rank:
        content = self._known.content(number)
        stages = [
            Stage(
                sum(n * kinds[kind].forward.total for kind, n in chunk),
                sum(n * kinds[kind].backward.total for kind, n in chunk),
                sum(n * kinds[kind].weights for kind, n in chunk),
            )
            for chunk in content.chunks
        ]
        own = [(kinds[kind], n) for kind, n in content.kinds.items()]
        forward = sum(n * kind.forward.computing for kind, n in own)
        backward = sum(n * kind.backward.computing for kind, n in own)
        groups = self._known.groups(layout, number)
        end = ended(groups, layout, forward, backward, self._cluster, ways)
        return Rank(stages, own, end, sum(end.exposed.values()) + end.update)

    def least(self, layout: Layout) -> float:
        """Return seconds that a step takes at the least, much sooner than those that it takes.

        As far as roundings leave that sure. Of the first and the last rank of equal ones: until the
        first micro-batch comes, all that it computes without a pause, and if backwards are whole,
        the way of the last one back to the first rank.
        """
        ranks, number = self.ranks(layout), layout.micro_batches
        coming, going = [0.0], [0.0]  # of the chunks that come first
        for rank in ranks:
            coming.append(coming[-1] + rank.stages[0].forward)
            going.append(going[-1] + rank.stages[0].backward)
        found = 0.0
        for _, at in self._known.ends(layout):
            own = ranks[at]
            busy = number * sum(each.forward + each.backward for each in own.stages)
            done = SURE * (coming[at] + busy)
            found = max(found, done + own.after)
            if layout.schedule not in SPLIT:
                found = max(found, done + SURE * going[at] + ranks[0].after)
        return found

    def stages(self, layout: Layout, ranks: list[Rank]) -> list[Stage]:
        """Return the stages of all ranks in the order of the forward."""
        order = _order(layout.schedule, layout.grid.pp, layout.chunks)
        return [ranks[rank].stages[chunk] for rank, chunk in order]

    def message(self, layout: Layout) -> float:
        """Return seconds of a message between stages: what a layer hands on, the slowest way."""
        if layout.grid.pp == 1:
            return 0.0
        way = self._routes(layout.grid)["pp"]
        key = layout.cut, layout.micro_rows, way
        if key not in self._messages:
            handed = self._known.handed(layout)
            self._messages[key] = seconds("send", 1, handed, way, self._cluster)
        return self._messages[key]

    def step(self, layout: Layout) -> float:
        """Return the seconds of a step alone, sooner than all that `exact` says of it."""
        ranks = self.ranks(layout)
        done = ends(layout, self.stages(layout, ranks), self.message(layout))
        after = [rank.after for rank in ranks]
        return max(a + b for a, b in zip(done, after, strict=True)) + self._control(layout)

    def _control(self, layout: Layout) -> float:
        ways = self._routes(layout.grid)
        return sum(
            seconds("all_reduce", n, 0, ways[axis], self._cluster) for axis, n in CONTROL.items()
        )

    def exact(self, layout: Layout) -> Time:
        """Return the time of a step."""
        ranks = self.ranks(layout)
        message, order = self.message(layout), self.stages(layout, ranks)
        done, control = ends(layout, order, message), self._control(layout)
        totals = [end + rank.after for end, rank in zip(done, ranks, strict=True)]
        slowest = max(range(len(ranks)), key=totals.__getitem__)
        without = max(ends(layout, order, 0.0)) if message else max(done)
        return _summed(
            layout, ranks[slowest], totals[slowest] + control, max(done), control,
            max(done) - without, self._cluster.device.spread,
        )  # fmt: skip


def _summed(
    layout: Layout, rank: Rank, step: float, pipeline: float, control: float, passing: float,
    spread: float,
) -> Time:  # fmt: skip
    number = layout.micro_batches
    exposed = summed(
        [
            (each, n * number)
            for k, n in rank.kinds
            for each in (k.forward.exposed, k.backward.exposed)
        ]
        + [(rank.end.exposed, 1), ({"pp": passing, "world": control}, 1)]
    )
    hidden = summed(
        [
            (each, n * number)
            for k, n in rank.kinds
            for each in (k.forward.hidden, k.backward.hidden)
        ]
        + [(rank.end.hidden, 1)]
    )
    computing = rank.computing * number
    busy = number * sum(each.forward + each.backward for each in rank.stages)
    bubble = max(0.0, pipeline - busy - passing) / step if step else 0.0
    unsure = spread * (computing + rank.end.update) * (1 + bubble)
    return Time(
        step, computing, {k: v for k, v in exposed.items() if v},
        {k: v for k, v in hidden.items() if v}, bubble, rank.end.update,
        step - unsure, step + unsure + sum(hidden.values()),
    )  # fmt: skip


@cache
def _order(schedule: str, pp: int, chunks: int) -> list[tuple[int, int]]:
    """Return rank and chunk of each stage."""
    each = enumerate(stages_of(schedule, pp, chunks))
    found = {stage: (rank, at) for rank, own in each for at, stage in enumerate(own)}
    return [found[stage] for stage in sorted(found)]
