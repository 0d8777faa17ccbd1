"""Seconds of collectives: the links that a group crosses, and alpha-beta of what runs on them."""

from __future__ import annotations

import math
from typing import NamedTuple

from ...parallel.pg_manager import Grid
from ..clusters import Cluster

_ONE = ("send", "exchange")  # a message, to one other rank
_NONE = ("receive", "barrier")  # counted where they are sent; never in a step


class Level(NamedTuple):
    """How a group uses a level of links.

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
    steps = _steps(grid, axis)
    size = math.prod(size for _, size in steps)
    levels: list[Level] = []
    inside = 1
    for at, link in enumerate(cluster.links):
        here = math.prod(min(size, max(1, link.ranks // stride)) for stride, size in steps)
        if here > inside:
            levels.append(Level(here, inside, at))
            inside = here
        if here == size:
            break
    return Route(size, tuple(levels))


def _steps(grid: Grid, axis: str) -> list[tuple[int, int]]:
    """Return (stride, size) of the axes that a group runs over; tp is the fastest."""
    strides = {"tp": 1, "cp": grid.tp, "pp": grid.tp * grid.cp, "dp": grid.tp * grid.cp * grid.pp}
    if axis not in ("ep", "edp", "etp"):
        return [(strides[name], getattr(grid, name)) for name in axis.split("_")]
    # Among the ranks of a stage, in the order dp, cp, tp: so many apart, so many of them.
    apart = {"etp": 1, "ep": grid.etp, "edp": grid.etp * grid.ep}[axis]
    size, plane = grid.size(axis), grid.tp * grid.cp
    near = min(size, max(1, plane // apart))
    far = size // near
    return [(apart, near), (max(1, apart // plane) * plane * grid.pp, far)]


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
