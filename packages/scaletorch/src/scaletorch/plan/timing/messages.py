"""Seconds of collectives: the links that a group crosses, and an alpha-beta model of its calls."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

from ...parallel.pg_manager import Grid
from ..clusters import Cluster

WORLD = "tp_cp_pp_dp"  # all ranks
_ONE = ("send", "exchange")  # one message to one other rank
_NONE = ("receive", "barrier")  # counted at the sender; not part of a step


class Level(NamedTuple):
    """A group's use of one level of links.

    Attributes:
        size: Ranks of the group that this level joins.
        inside: Ranks of the group that the level below joins; they send in parallel.
        at: Index of the link.
    """

    size: int
    inside: int
    at: int


class Route(NamedTuple):
    """The levels of links that a group uses, innermost first; none for a group of one rank."""

    ranks: int
    levels: tuple[Level, ...]


def route(grid: Grid, axis: str, cluster: Cluster) -> Route:
    """Return the links that the groups of an axis use.

    Args:
        grid: Grid of the ranks, which are placed on the cluster in rank order.
        axis: Axis of `Grid`; "edp" and "ep" fold the ranks of a stage.
        cluster: The cluster.
    """
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
    """Return the seconds of `count` calls, one after another.

    A ring's steps cross each level as often as its neighbours do. The ranks of a group inside the
    level below each carry a share of the data over the level, by their own links. In all_to_all
    each rank sends to every other by its own link. A single message takes the outermost, slowest
    level.

    Args:
        operation: Name in `scaletorch.dist`.
        count: Number of calls.
        size: Bytes that a rank sends in all calls, with ring algorithms.
        way: Links of the group.
        cluster: The cluster.
    """
    if way.ranks < 2 or operation in _NONE:
        return 0.0
    links = cluster.links
    latency = spent = 0.0
    for level in way.levels:
        alpha, bandwidth = links[level.at].of(operation)
        hops = level.size // level.inside - 1
        if operation in _ONE:
            latency, spent = alpha, size / bandwidth
        elif operation == "all_to_all":
            share = (level.size - level.inside) / (way.ranks - 1)
            latency += alpha * hops
            spent += size * share / bandwidth
        else:
            latency += alpha * in_turn(operation, hops)
            spent = max(spent, size / (bandwidth * level.inside))
    return count * latency + spent


def in_turn(operation: str, hops: int) -> int:
    """Return the sequential steps at a level: of a ring, or of a tree if that has fewer."""
    if operation in _ONE:
        return 1
    if operation == "all_reduce":
        return 2 * min(hops, math.ceil(math.log2(hops + 1)))
    if operation in ("broadcast", "reduce"):
        return math.ceil(math.log2(hops + 1))
    return hops
