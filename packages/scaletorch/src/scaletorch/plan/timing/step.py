"""Seconds of a step of a layout on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import accumulate
from operator import add
from typing import NamedTuple

from ...parallel.pg_manager import Grid
from ...parallel.pipeline_parallel import Timeline
from ..clusters import Cluster
from ..description import Description
from ..estimate import Time
from ..holding import Holdings
from ..holding.stages import stages_of
from ..layout import Layout
from .kinds import INNER, Kind, Spends, kinds_of, summed
from .messages import Route, route, seconds
from .pipelines import Stage, built, ends, simulated
from .ranks import Known, Rank, ranks_of

OUTER = ("pp", "cp_dp", "edp")  # axes outside of blocks
WORLD = "tp_cp_pp_dp"
# All-reduces of a few numbers in each step: tokens are counted, ranks agree, losses are summed.
CONTROL = {WORLD: 1, "pp": 2, "cp_dp": 2}

FILLED = ("1f1b", "afab")  # schedules of one stage a rank, whose backwards are whole
UNSURE = 1e-9  # share by which sums in another order may be off


class Timers(NamedTuple):
    """What tells how long layouts of one model take on a cluster.

    Attributes:
        exact: Returns `time` of a layout.
        least: Returns seconds that its step takes at the least, sooner: those in which the busiest
            rank of its pipeline computes, with messages that it waits for meanwhile; of `FILLED`
            also those in which a micro-batch comes to it from the first rank, and goes back.
    """

    exact: Callable[[Layout], Time]
    least: Callable[[Layout], float]


class Shared(NamedTuple):
    """What layouts of a model have in common that have the same cut and the same routes in it.

    Attributes:
        kinds: What blocks take.
        whole: Seconds of each, forward and backward.
        ranks: What ranks take, of `ranks_of`.
        busy: Seconds of ranks for a micro-batch, by their numbers.
    """

    kinds: list[Kind]
    whole: list[float]
    ranks: Known
    busy: dict[int, float]


# The timers that `time` used last: a search asks for layout after layout of one model.
_LATEST: list[tuple[Description, Cluster, Timers]] = []


def time(description: Description, layout: Layout, cluster: Cluster) -> Time:
    """Return how long a step takes: forward, backward and update of a global batch.

    Computing is a roofline of each block's operations with the shares of the peaks that the device
    reaches; messages are alpha-beta by the links that a group crosses; the pipeline is its
    schedule, simulated if it is short, else in closed form (`timing.closed`). `low` and `high` are
    the step if computing is off by the device's `spread` either way, and for `high` if nothing of
    what is taken to hide does: no bounds, but what the estimate is least sure of.

    Offloading (`recompute="offload"`) is taken to hide behind computing.

    Args:
        description: Of the model.
        layout: Of `layout.grid.world_size` ranks.
        cluster: With so many at least.

    Raises:
        InvalidArgumentError: The model is not described so, or cannot be cut so; or the device has
            no figure for its dtype.
    """
    return timers(description, cluster).exact(layout)


def timer(description: Description, cluster: Cluster) -> Callable[[Layout], Time]:
    """Return `time` for many layouts of one model: what they share is worked out once."""
    return timers(description, cluster).exact


def timers(description: Description, cluster: Cluster) -> Timers:
    """Return what tells the times of many layouts of one model."""
    for known, its, found in _LATEST:
        if known is description and its is cluster:
            return found
    found = _timers(description, cluster)
    _LATEST[:] = [(description, cluster, found)]
    return found


def _timers(description: Description, cluster: Cluster) -> Timers:
    known: dict[tuple[object, ...], Shared] = {}
    alike: dict[tuple[Route, ...], int] = {}
    spends: Spends = {}
    holdings = Holdings(description)

    @cache
    def inner(grid: Grid) -> tuple[dict[str, Route], int]:
        ways = {axis: route(grid, axis, cluster) for axis in INNER}
        return ways, alike.setdefault(tuple(ways.values()), len(alike))

    @cache
    def of_grid(grid: Grid) -> tuple[dict[str, Route], float]:
        ways = inner(grid)[0] | {axis: route(grid, axis, cluster) for axis in (*OUTER, WORLD)}
        return ways, _control(cluster, ways)

    def shared(layout: Layout) -> Shared:
        ways, place = inner(layout.grid)
        key = layout.cut, layout.micro_rows, layout.recompute, place
        if key not in known:
            kinds = kinds_of(description, layout, cluster, ways, spends)
            whole = [each.forward.total + each.backward.total for each in kinds]
            known[key] = Shared(kinds, whole, {}, {})
        return known[key]

    def exact(layout: Layout) -> Time:
        ways, control = of_grid(layout.grid)
        own = shared(layout)
        ranks = ranks_of(holdings, layout, cluster, own.kinds, ways, own.ranks)
        return _time(description, layout, cluster, ranks, ways["pp"], control)

    def least(layout: Layout) -> float:
        _, whole, _, busy = shared(layout)
        numbers = {*holdings.numbers(layout)}
        most: float
        for number in numbers - busy.keys():
            busy[number] = sum([n * whole[k] for k, n in holdings.kinds(number).items()])
        batches, quicker = layout.micro_batches, max(_speeds(layout, cluster), default=1.0)
        if layout.schedule in FILLED:
            each = [busy[place] for place in holdings.numbers(layout)]
            most = max(map(add, accumulate(each, initial=0.0), [batches * one for one in each]))
        else:
            most = batches * max([busy[place] for place in numbers])
        return most / quicker * (1 - UNSURE)

    return Timers(exact, least)


def timeline(description: Description, layout: Layout, cluster: Cluster) -> Timeline:
    """Return when each rank of the pipeline computes what in a step, in seconds.

    Without gradients' sums and the update, which come after it, and as if each rank had a device.

    Args:
        description: Of the model.
        layout: Of `layout.grid.world_size` ranks.
        cluster: With so many at least.

    Raises:
        InvalidArgumentError: As `time`.
    """
    ways = {axis: route(layout.grid, axis, cluster) for axis in (*INNER, *OUTER, WORLD)}
    kinds = kinds_of(description, layout, cluster, ways, {})
    ranks = ranks_of(Holdings(description), layout, cluster, kinds, ways, {})
    message = _message(description, layout, cluster, ways["pp"])
    schedule = built(layout.schedule, layout.grid.pp, layout.micro_batches, len(ranks[0].stages))
    return replace(simulated(schedule, _in_order(layout, ranks), message), unit="s")


def _time(
    description: Description, layout: Layout, cluster: Cluster, ranks: list[Rank], way: Route,
    control: float,
) -> Time:  # fmt: skip
    order = _in_order(layout, ranks)
    message = _message(description, layout, cluster, way)
    speeds = _speeds(layout, cluster)
    name, chunks, number = layout.schedule, len(ranks[0].stages), layout.micro_batches
    done = ends(name, chunks, number, order, message, speeds)
    totals = [
        end + sum(rank.end.exposed.values()) + rank.end.update
        for end, rank in zip(done, ranks, strict=True)
    ]
    slowest = max(range(len(ranks)), key=totals.__getitem__)
    step = totals[slowest] + control
    without = max(ends(name, chunks, number, order, 0.0, speeds)) if message else max(done)
    return _summed(
        layout, ranks[slowest], step, max(done), control, max(done) - without,
        cluster.device.spread,
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


def _control(cluster: Cluster, ways: Mapping[str, Route]) -> float:
    return sum(
        seconds("all_reduce", count, 0, ways[axis], cluster) for axis, count in CONTROL.items()
    )


def _in_order(layout: Layout, ranks: list[Rank]) -> list[Stage]:
    """Return the stages of all ranks in the order of the forward."""
    order = _order(layout.schedule, layout.grid.pp, layout.chunks)
    return [ranks[rank].stages[chunk] for rank, chunk in order]


@cache
def _order(schedule: str, pp: int, chunks: int) -> list[tuple[int, int]]:
    """Return rank and chunk of each stage."""
    each = enumerate(stages_of(schedule, pp, chunks))
    found = {stage: (rank, at) for rank, own in each for at, stage in enumerate(own)}
    return [found[stage] for stage in sorted(found)]


def _message(description: Description, layout: Layout, cluster: Cluster, way: Route) -> float:
    """Return seconds of a message between stages: what a layer hands on, the slowest way."""
    if layout.grid.pp == 1:
        return 0.0
    behaviours = description.behaviours(layout.cut)
    kinds = {block.kind for block in description.blocks if block.place != "last"}
    handed = max(behaviours[kind].handed.at(layout.micro_rows) for kind in kinds)
    return seconds("send", 1, handed, way, cluster)


def _speeds(layout: Layout, cluster: Cluster) -> list[float]:
    """Return how much quicker ranks are while some of the pipeline's wait; [] if they share none.

    The ranks of the other axes compute when theirs of the pipeline do.
    """
    grid, cores = layout.grid, cluster.cores
    if not cores or grid.pp == 1:
        return []
    beside = grid.world_size // grid.pp
    slowest = min(1.0, cores / grid.world_size)
    return [min(1.0, cores / (at * beside)) / slowest for at in range(1, grid.pp + 1)]
