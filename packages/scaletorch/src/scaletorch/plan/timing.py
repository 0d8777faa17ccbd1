"""Seconds of a step of a layout on a cluster: blocks, the pipeline, gradients and update.

The pipeline's schedule is simulated. Since it repeats itself, a long one is simulated twice with
few micro-batches and extrapolated by their difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from math import ceil
from typing import Any, NamedTuple

from ..parallel.pg_manager import Grid
from ..parallel.pipeline_parallel import Costs
from ..parallel.pipeline_parallel.schedules import rank_ends
from .clusters import Cluster
from .costs import WORLD, Route, Seconds, block_seconds, route, seconds, summed
from .description import Description, Layout
from .estimate import Time
from .facts import SPLIT, Facts, Group, once_for, schedule_of, stages_of

INNER = ("tp", "cp", "ep")  # axes of communication inside blocks
OUTER = ("pp", "cp_dp", "edp")  # axes of communication between blocks and of gradients
# Small all-reduces in each step: token counts, agreement of ranks, losses.
CONTROL = {WORLD: 1, "pp": 2, "cp_dp": 2}
SURE = 0.97  # safety factor of lower bounds: times are rounded before a schedule is simulated
DIGITS = 2  # digits of the time ratios in the cache key of simulations
UPDATED = 7  # Adam reads parameter, gradient and two moments, and writes all but the gradient

Stage = tuple[Seconds, Seconds]  # forward and backward of a micro-batch


class Rank(NamedTuple):
    """Seconds of a pipeline rank."""

    stages: list[Stage]  # forward and backward of a micro-batch, by chunk
    batch: Seconds  # a micro-batch in all chunks, forward and backward
    end: Seconds  # gradient and parameter messages after the pipeline
    update: float

    @property
    def after(self) -> float:
        """Seconds after its pipeline ends."""
        return self.end.total + self.update


def time(description: Description, layout: Layout, cluster: Cluster) -> Time:
    """Return the seconds of a step: forward, backward and update of a global batch.

    Computing is a roofline of each block's operations, with the peak shares that the device
    reaches. Messages follow an alpha-beta model of the links that a group crosses. The pipeline's
    schedule is simulated. `low` and `high` change computing by the device's `spread`; for `high`,
    no communication is hidden. They are no bounds, but cover the least certain assumptions.

    Args:
        description: The model.
        layout: A layout of `layout.grid.world_size` ranks.
        cluster: A cluster with at least as many ranks.

    Raises:
        InvalidArgumentError: The model is not described with this cut, or cannot have it; or the
            device has no figure for its dtype.
    """
    return Steps(description, cluster).exact(layout)


class Steps:
    """Step times of one model's layouts on a cluster, with a cache of what layouts share."""

    def __init__(
        self, description: Description, cluster: Cluster, facts: Facts | None = None
    ) -> None:
        self.found: dict[Any, Any] = {}
        self._description, self._cluster = description, cluster
        self._facts = facts or Facts(description)
        self._routes = cache(
            lambda grid: {a: route(grid, a, cluster) for a in (*INNER, *OUTER, WORLD)}
        )

    def ranks(self, layout: Layout) -> list[Rank]:
        """Return the seconds of each pipeline rank; equal ranks are computed once."""
        ways = self._routes(layout.grid)
        rounds = layout.micro_batches if layout.zero >= 2 else 1
        own = (
            layout.cut, layout.micro_rows, layout.recompute, layout.zero, rounds,
            *(ways[axis] for axis in (*INNER, *OUTER)),
        )  # fmt: skip
        numbers, _ = self._facts.pipeline(layout)
        each = {number: self._rank(layout, number, ways, own) for number in {*numbers}}
        return [each[number] for number in numbers]

    def _of_kinds(self, layout: Layout, ways: Mapping[str, Route]) -> list[Stage]:
        """Return the seconds of a block of each kind; full recomputation runs layers twice."""
        found = self._once_each(layout, ways)
        if layout.recompute != "full":
            return found
        return [
            (once, summed([(back, 1), (once, int(kind in self._facts.layers))]))
            for kind, (once, back) in enumerate(found)
        ]

    @once_for(lambda _, layout, ways: (layout.cut, layout.micro_rows, *(ways[a] for a in INNER)))
    def _once_each(self, layout: Layout, ways: Mapping[str, Route]) -> list[Stage]:
        known, rows = self._description, layout.micro_rows
        return [
            (
                block_seconds(own, "forward", rows, known.dtype, self._cluster, ways),
                block_seconds(own, "backward", rows, known.dtype, self._cluster, ways),
            )
            for own in known.behaviours(layout.cut)
        ]

    @once_for(lambda _, layout, number, ways, own: (number, own))
    def _rank(self, layout: Layout, number: int, ways: Mapping[str, Route], own: Any) -> Rank:
        """Return the seconds of a pipeline rank, which depend on its number and `own` alone."""
        kinds, chunks = self._of_kinds(layout, ways), self._facts.contents[number].chunks
        forward, backward = (
            [summed((kinds[kind][way], n) for kind, n in chunk) for chunk in chunks]
            for way in (0, 1)
        )
        both = [sum(each.computing for each in way) for way in (forward, backward)]
        end, update = _ended(self._facts.groups(layout, number), layout, both, self._cluster, ways)
        batch = summed((each, 1) for each in (*forward, *backward))
        return Rank([*zip(forward, backward, strict=True)], batch, end, update)

    def floor(self, layout: Layout) -> float:
        """Return a cheaper lower bound than `least`: the mean computing time, for all savings."""
        return SURE * self._computing(layout) * layout.micro_batches / layout.grid.pp

    @once_for(lambda _, layout: (layout.cut, layout.micro_rows))  # wherever the ranks are placed
    def _computing(self, layout: Layout) -> float:
        plain = replace(layout, recompute="none", zero=0)
        described = plain.cut in self._description.cuts
        kinds = self._of_kinds(plain if described else layout, self._routes(layout.grid))
        each = (kinds[block.kind] for block in self._description.blocks)
        return sum(way.computing for pair in each for way in pair)

    def least(self, layout: Layout) -> float:
        """Return a lower bound of the step time without a simulation; `SURE` allows for rounding.

        It is the time until a rank's first micro-batch arrives, plus all of its computing, plus the
        last backward's way to the first rank if backwards are not split.
        """
        ranks, number = self.ranks(layout), layout.micro_batches
        coming, going = [0.0], [0.0]  # passes through earlier ranks' first chunks
        for rank in ranks:
            forward, backward = rank.stages[0]
            coming.append(coming[-1] + forward.total)
            going.append(going[-1] + backward.total)
        found = 0.0
        for _, at in self._facts.pipeline(layout)[1]:
            own = ranks[at]
            done = SURE * (coming[at] + number * own.batch.total)
            found = max(found, done + own.after)
            if layout.schedule not in SPLIT:
                found = max(found, done + SURE * going[at] + ranks[0].after)
        return found

    def step(self, layout: Layout) -> float:
        """Return the seconds of a step alone, by one simulation."""
        return self._last(layout)[0]

    def exact(self, layout: Layout) -> Time:
        """Return the time of a step, on the rank that ends last."""
        step, rank, pipeline = self._last(layout)
        number, control = layout.micro_batches, self._control(layout)
        passing = pipeline - max(self._ends(layout, 0.0))
        others = Seconds(exposed={"pp": passing, "world": control})
        whole = summed([(rank.batch, number), (rank.end, 1), (others, 1)])
        busy = number * rank.batch.total + passing
        bubble = max(0.0, pipeline - busy) / step if step else 0.0
        unsure = self._cluster.device.spread * (whole.computing + rank.update) * (1 + bubble)
        hidden = {axis: each for axis, each in whole.hidden.items() if each}
        return Time(
            step, whole.computing, {axis: each for axis, each in whole.exposed.items() if each},
            hidden, bubble, rank.update, step - unsure, step + unsure + sum(hidden.values()),
        )  # fmt: skip

    def _last(self, layout: Layout) -> tuple[float, Rank, float]:
        """Return when the last rank ends, that rank, and when the pipeline ends."""
        way, size = self._routes(layout.grid)["pp"], self._facts.handed(layout)
        done = self._ends(layout, seconds("send", 1, size, way, self._cluster))
        ends = [end + rank.after for end, rank in zip(done, self.ranks(layout), strict=True)]
        last = ends.index(max(ends))
        return ends[last] + self._control(layout), self.ranks(layout)[last], max(done)

    def _control(self, layout: Layout) -> float:
        """Return the seconds of the small all-reduces of a step."""
        ways, cluster = self._routes(layout.grid), self._cluster
        return sum(seconds("all_reduce", n, 0, ways[axis], cluster) for axis, n in CONTROL.items())

    def _ends(self, layout: Layout, message: float) -> list[float]:
        """Return when each pipeline rank ends its last action, with messages that take so long."""
        number, pp = layout.micro_batches, layout.grid.pp
        ranks, order = self.ranks(layout), _order(layout.schedule, pp, layout.chunks)
        if pp == 1:
            return [number * sum(each.total for stage in ranks[0].stages for each in stage)]
        stages = [ranks[rank].stages[chunk] for rank, chunk in order]
        costs = _costs(stages, message)
        unit = (costs.forward + costs.backward) / len(stages)

        def share(seconds: float, scale: int = 1) -> float:
            return max(round(seconds / unit * scale, DIGITS) / scale, 1e-12)

        alike = (
            layout.schedule, layout.chunks, pp, share(costs.forward), share(costs.backward),
            share(costs.backward_input), share(costs.backward_weight),
            round(message / unit, DIGITS + 1),
            tuple(share(each * unit, len(stages)) for each in costs.stages),
        )  # fmt: skip
        few = (2 if layout.chunks > 1 else 1) * pp + number % pp
        if number <= few + pp:
            return [end * unit for end in _ends(*alike, number)]
        near, far = _ends(*alike, few), _ends(*alike, few + pp)
        rounds = (number - few) // pp
        return [(a + (b - a) * rounds) * unit for a, b in zip(near, far, strict=True)]


def _ended(
    groups: Sequence[Group], layout: Layout, computing: Sequence[float], cluster: Cluster,
    routes: Mapping[str, Route],
) -> tuple[Seconds, float]:  # fmt: skip
    """Return the gradient and parameter messages that follow a pipeline, and the update.

    Backward hides all buckets but the last; `computing` has a micro-batch's forward and backward.
    """
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    update, device = 0.0, cluster.device
    speed = device.updating or device.moving
    for axis in {group.axis: None for group in groups}:
        own, way = [group for group in groups if group.axis == axis], routes[axis]
        elements, size = sum(e.elements for e in own), sum(e.elements * e.item for e in own)
        update += UPDATED * size / (way.ranks if layout.zero else 1) / speed
        update += sum(e.tensors for e in own) * device.overhead
        if way.ranks == 1 or not elements:
            continue
        over = size * (way.ranks - 1) / way.ranks
        buckets = ceil(elements / Group(axis, 1, elements).usual)
        call, sent = ("reduce_scatter", over) if layout.zero else ("all_reduce", 2 * over)
        took = seconds(call, buckets, sent, way, cluster)
        beside = min(took, computing[1]) * (buckets - 1) / buckets * device.hides
        rounds = layout.micro_batches if layout.zero >= 2 else 1
        exposed[axis], hidden[axis] = (took - beside) * rounds, beside * rounds
        if layout.zero:
            gather = seconds("all_gather", buckets, over, way, cluster)
            # ZeRO 3 gathers parameters before each forward and each backward of a micro-batch.
            times, each = (1, [0.0]) if layout.zero < 3 else (rounds, computing)
            for room in each:
                covered = min(gather, room) * device.hides
                exposed[axis] += (gather - covered) * times
                hidden[axis] += covered * times
    for group in groups:
        if group.others:
            size = group.elements * group.item * group.others
            calls = 2 * group.others * group.tensors
            waited = seconds("send", calls, size, routes["pp"], cluster)
            exposed["pp"] = exposed.get("pp", 0.0) + waited
    return Seconds(0.0, 0.0, exposed, hidden), update


@lru_cache(maxsize=4096)
def _ends(
    schedule: str, chunks: int, ranks: int, forward: float, backward: float, inputs: float,
    weights: float, message: float, stages: tuple[float, ...], batches: int,
) -> list[float]:  # fmt: skip
    layout = Layout(Grid(pp=ranks), schedule=schedule, chunks=chunks, micro_batches=batches)
    costs = Costs(forward, backward, inputs, weights, message, stages)
    return rank_ends(schedule_of(layout), costs)


def _costs(stages: Sequence[Stage], message: float) -> Costs:
    """Return costs with each stage's factor relative to the mean."""
    forward = sum(each.total for each, _ in stages)
    backward = sum(each.total for _, each in stages)
    weights = sum(each.weights for _, each in stages)
    whole, tiny = forward + backward, 1e-12 * (1 + forward + backward)
    factors = [max(tiny, (one.total + two.total) / (whole or 1)) for one, two in stages]
    return Costs(
        max(forward, tiny), max(backward, tiny), max(backward - weights, tiny),
        max(weights, tiny), message, factors,
    )  # fmt: skip


@cache
def _order(schedule: str, pp: int, chunks: int) -> list[tuple[int, int]]:
    """Return (rank, chunk) of each stage in the order of the forward."""
    each = enumerate(stages_of(schedule, pp, chunks))
    found = {stage: (rank, at) for rank, own in each for at, stage in enumerate(own)}
    return [found[stage] for stage in sorted(found)]
