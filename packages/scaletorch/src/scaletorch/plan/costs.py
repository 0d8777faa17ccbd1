"""Seconds of a block on a rank: a roofline of operations, an alpha-beta model of messages."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..parallel.pg_manager import Grid
from .clusters import Cluster, Device, Shares
from .description import Behaviour, Work

SORTS = ("matmul", "attention", "other")
WORLD = "tp_cp_pp_dp"  # all ranks


class Level(NamedTuple):
    """A group's use of one level of links."""

    size: int  # ranks of the group that this level joins
    inside: int  # ranks of the group that the level below joins; they send in parallel
    at: int  # index of the link


class Route(NamedTuple):
    """The levels of links that a group uses, innermost first; none for a group of one rank."""

    ranks: int
    levels: tuple[Level, ...]


def route(grid: Grid, axis: str, cluster: Cluster) -> Route:
    """Return the links that the groups of an axis use, with ranks on the cluster in their order."""
    group = range(grid.world_size) if axis == WORLD else grid.group(axis, 0)
    levels: list[Level] = []
    inside = 1
    for at, link in enumerate(cluster.links):
        here = bisect_left(group, link.ranks)
        if here > inside:
            levels.append(Level(here, inside, at))
            inside = here
    return Route(len(group), tuple(levels))


def seconds(operation: str, count: float, size: float, way: Route, cluster: Cluster) -> float:
    """Return the seconds of `count` calls in turn, in which a rank sends `size` bytes together.

    Ranks inside the level below share a ring's data over a level; one message takes the slowest.
    """
    if way.ranks < 2:
        return 0.0
    links = cluster.links
    latency = spent = 0.0
    for level in way.levels:
        alpha, bandwidth = links[level.at].of(operation)
        hops = level.size // level.inside - 1
        if operation == "send":  # to one other rank
            latency, spent = alpha, size / bandwidth
        elif operation == "all_to_all":
            share = (level.size - level.inside) / (way.ranks - 1)
            latency += alpha * hops
            spent += size * share / bandwidth
        else:
            # The sequential steps of a ring, or of a tree if that has fewer.
            tree = math.ceil(math.log2(hops + 1))
            steps = {"all_reduce": 2 * min(hops, tree), "broadcast": tree, "reduce": tree}
            latency += alpha * steps.get(operation, hops)
            spent = max(spent, size / (bandwidth * level.inside))
    return count * latency + spent


class Seconds(NamedTuple):
    """Seconds of a rank."""

    computing: float = 0.0  # computation without messages
    weights: float = 0.0  # the share of it for weight gradients, which some schedules defer
    exposed: Mapping[str, float] = {}  # messages that computation waits for, by axis
    hidden: Mapping[str, float] = {}  # messages that overlap with computation, by axis

    @property
    def total(self) -> float:
        """Computation and exposed messages."""
        return self.computing + sum(self.exposed.values())


def summed(terms: Iterable[tuple[Seconds, float]]) -> Seconds:
    """Return the weighted sum of pairs (seconds, factor)."""
    computing = weights = 0.0
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    for term, times in terms:
        computing += term.computing * times
        weights += term.weights * times
        for total, own in ((exposed, term.exposed), (hidden, term.hidden)):
            for axis, each in own.items():
                total[axis] = total.get(axis, 0.0) + each * times
    return Seconds(computing, weights, exposed, hidden)


def block_seconds(
    behaviour: Behaviour, phase: str, rows: int, dtype: str, cluster: Cluster,
    routes: Mapping[str, Route],
) -> Seconds:  # fmt: skip
    """Return the seconds of a block in "forward" or "backward" of a micro-batch.

    Asynchronous cp messages overlap with attention on the rank's own positions, other asynchronous
    messages with all computation of the block, as far as the device can do both.
    """
    times = dict.fromkeys(SORTS, 0.0)
    for work in behaviour.work:
        if work.phase == phase:
            sort = work.operation if work.operation in SORTS else "other"
            times[sort] += _roofline(work, sort, rows, dtype, cluster.device)
    computing = sum(times.values())
    exposed: dict[str, float] = {}
    beside: dict[str, float] = {}
    for sent in behaviour.sent:
        if sent.phase == phase:
            axis, size = sent.axis, sent.bytes.at(rows)
            took = seconds(sent.operation, sent.count, size, routes[axis], cluster)
            # A ring sends keys and values during the attention on the previous ones.
            passes = not sent.awaited or (axis == "cp" and sent.operation == "send")
            into = beside if passes else exposed
            into[axis] = into.get(axis, 0.0) + took
    hidden: dict[str, float] = {}
    for axis, took in beside.items():
        room = times["attention"] if axis == "cp" else computing
        hidden[axis] = min(took * cluster.device.hides, room)
        exposed[axis] = exposed.get(axis, 0.0) + took - hidden[axis]
    # One of the two matrix products of a backward is for the weights.
    weights = times["matmul"] / 2 if phase == "backward" else 0.0
    return Seconds(computing, weights, exposed, hidden)


def _roofline(work: Work, sort: str, rows: int, dtype: str, device: Device) -> float:
    """Return the larger of compute and memory time, plus the overhead of each operation."""
    count, flops, moved = work.count, work.flops.at(rows), work.moved.at(rows)
    if not count:
        return 0.0
    share = device.efficiency
    bandwidth = device.moving * efficiency(share.get("other", ()), moved / count)
    computing = 0.0
    if flops and sort != "other":
        name = f"{sort} backward" if work.phase == "backward" else sort
        shares = share.get(name) or share.get(sort, ())
        computing = flops / (device.peak(dtype) * efficiency(shares, flops / count))
    return max(computing, moved / bandwidth) + count * device.overhead


def efficiency(shares: Shares, size: float) -> float:
    """Return the share of the peak of a size, interpolated by logarithm; 1 if none is known."""
    if not shares:
        return 1.0
    at = bisect_right(shares, (size, math.inf))
    if at in (0, len(shares)):
        return shares[min(at, len(shares) - 1)][1]
    (below, low), (above, high) = shares[at - 1], shares[at]
    return low + (high - low) * math.log(size / below) / math.log(above / below)
