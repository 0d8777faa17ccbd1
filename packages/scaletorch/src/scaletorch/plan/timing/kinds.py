"""What blocks take in a layout, by their kinds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..clusters import Cluster
from ..description import Description
from ..layout import Layout
from .blocks import Spent, spent
from .messages import Route

INNER = ("tp", "cp", "ep")  # axes inside of blocks
# Forward and backward of each kind, by cut, rows and routes.
Spends = dict[tuple[object, ...], list[tuple[Spent, Spent]]]


class Kind(NamedTuple):
    """A kind of block on a rank, for a micro-batch."""

    forward: Spent
    backward: Spent
    weights: float


def kinds_of(
    description: Description, layout: Layout, cluster: Cluster, ways: dict[str, Route],
    spends: Spends,
) -> list[Kind]:  # fmt: skip
    """Return what blocks take; `spends` has what was worked out before, and gets more."""
    layers = {block.kind for block in description.blocks if block.place == "layer"}
    key = layout.cut, layout.micro_rows, *(ways[axis] for axis in INNER)
    if key not in spends:
        spends[key] = [
            (
                spent(own, "forward", layout.micro_rows, description.dtype, cluster, ways),
                spent(own, "backward", layout.micro_rows, description.dtype, cluster, ways),
            )
            for own in description.behaviours(layout.cut)
        ]
    return [
        Kind(
            forward,
            _again(backward, forward, layout.recompute) if kind in layers else backward,
            backward.matmul / 2,  # of the two products, that for the weights
        )
        for kind, (forward, backward) in enumerate(spends[key])
    ]


def _again(backward: Spent, forward: Spent, recompute: str) -> Spent:
    """Return a backward with what it runs again before it."""
    if recompute != "full":
        return backward
    return Spent(
        backward.matmul + forward.matmul,
        backward.attention + forward.attention,
        backward.other + forward.other,
        summed([(backward.exposed, 1), (forward.exposed, 1)]),
        summed([(backward.hidden, 1), (forward.hidden, 1)]),
    )


def summed(parts: Iterable[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Add up seconds by axis, each so many times."""
    found: dict[str, float] = {}
    for part, times in parts:
        for axis, each in part.items():
            found[axis] = found.get(axis, 0.0) + each * times
    return found
