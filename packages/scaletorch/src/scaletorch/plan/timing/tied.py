"""Weights with two names: updated once on a rank, summed between ranks of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping

from ..clusters import Cluster
from ..description import Description
from ..layout import Layout
from .messages import Route, seconds


def tied_here(description: Description, here: Mapping[int, int]) -> set[str]:
    """Return names of parameters that another name of them stands for on the same rank."""
    found: set[str] = set()
    for names in description.tied:
        found.update([name for name in names if int(name.partition(".")[0]) in here][1:])
    return found


def summed_ties(
    description: Description, layout: Layout, rank: int, holders: Mapping[str, set[int]],
    cluster: Cluster, way: Route,
) -> float:  # fmt: skip
    """Return seconds in which gradients of tied weights go from stage to stage and are summed."""
    took = 0.0
    behaviours = description.behaviours(layout.cut)
    for name in (names[0] for names in description.tied):
        others = len(holders.get(name, set()) - {rank}) if rank in holders.get(name, ()) else 0
        kind, _, inner = name.partition(".")
        for each in behaviours[int(kind)].parameters if others else ():
            if each.name == inner:
                size = max(each.local) * each.item * others
                took += seconds("send", 2 * others, size, way, cluster)
    return took
