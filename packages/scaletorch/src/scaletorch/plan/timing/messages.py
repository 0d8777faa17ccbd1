"""Seconds of collectives: the links that a group crosses, and alpha-beta of what runs on them."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

from ...parallel.pg_manager import Grid
from ..clusters import Cluster

WORLD = "tp_cp_pp_dp"  # all ranks
_ONE = ("send", "exchange")  # a message, to one other rank
_NONE = ("receive", "barrier")  # counted where they are sent; never in a step


class Level(NamedTuple):
    """The use that a group makes of a level of links.

    Attributes:
        size: Ranks of the group that the level joins.
        inside: Ranks of the group that the level below joins: they send side by side.
        at: Index of the link.
    """

    size: int
    inside: int
    at: int


class Route(NamedTuple):
    """The links that a group uses, the innermost first; none for a group of one."""

    ranks: int
    levels: tuple[Level, ...]


def route(grid: Grid, axis: str, cluster: Cluster) -> Route:
    """Return which links the groups of an axis use.

    Args:
        grid: Of the ranks, which lie on the cluster in their order.
        axis: As `Grid` names it; "edp" and "ep" fold the ranks of a stage.
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
    """Return the seconds of so many calls, one after another.

    A ring's steps cross each level as often as its neighbours do; all ranks of a group that lie
    inside the level below carry a share over the level, each over its own link. In all_to_all
    every rank sends to every other by its own link alone, and a message takes the slowest.

    Args:
        operation: As `scaletorch.dist` calls it.
        count: Calls.
        size: Bytes that a rank sends in all of them, as rings send it.
        way: Of the group.
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
    """Return steps one after another at a level: of a ring, or of a tree if that has fewer."""
    if operation in _ONE:
        return 1
    if operation == "all_reduce":
        return 2 * min(hops, math.ceil(math.log2(hops + 1)))
    if operation in ("broadcast", "reduce"):
        return math.ceil(math.log2(hops + 1))
    return hops
