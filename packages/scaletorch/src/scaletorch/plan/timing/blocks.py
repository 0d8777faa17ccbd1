"""Seconds of a block's forward and backward on a rank: a roofline for each sort of operation."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..clusters.cluster import Cluster, Device, Shares
from ..description import Behaviour, Description, Sent, Work
from ..layout import Layout
from .messages import Route, seconds

INNER = ("tp", "cp", "ep")  # axes inside of blocks
# A backward, if a description has forwards alone: calls, flops and bytes for each of a forward.
# Of y = x w it is two products; attention runs its scores again (Dao 2022: 2.5 times the flops).
BACKWARD = {"matmul": (2.0, 2.0, 2.0), "attention": (1.0, 2.5, 2.0), "other": (1.5, 1.0, 1.5)}


class Spent(NamedTuple):
    """Seconds of a block for a micro-batch, in one direction.

    Attributes:
        matmul: Products, forward or backward.
        attention: Attention's core.
        other: All else that computes.
        exposed: Messages that it waits for, by axis.
        hidden: Messages that run beside it, by axis.
    """

    matmul: float
    attention: float
    other: float
    exposed: dict[str, float]
    hidden: dict[str, float]

    @property
    def computing(self) -> float:
        """Without messages."""
        return self.matmul + self.attention + self.other

    @property
    def total(self) -> float:
        """With those that it waits for."""
        return self.computing + sum(self.exposed.values())


def spent(
    behaviour: Behaviour, phase: str, rows: int, dtype: str, cluster: Cluster,
    routes: dict[str, Route],
) -> Spent:  # fmt: skip
    """Return what a block takes in a phase, "forward" or "backward"."""
    device = cluster.device
    times = {"matmul": 0.0, "attention": 0.0, "other": 0.0}
    for sort, each in _computed(behaviour, phase, rows, dtype, device):
        times[sort] += each
    exposed, hidden = _messages(
        (sent for sent in behaviour.sent if sent.phase == phase),
        rows, times["attention"], sum(times.values()), cluster, routes,
    )  # fmt: skip
    return Spent(times["matmul"], times["attention"], times["other"], exposed, hidden)


def _computed(
    behaviour: Behaviour, phase: str, rows: int, dtype: str, device: Device
) -> Iterable[tuple[str, float]]:
    described = any(work.phase == "backward" for work in behaviour.work)
    for work in behaviour.work:
        sort = work.operation if work.operation in BACKWARD else "other"
        if work.phase == phase:
            factors = (1.0, 1.0, 1.0)
        elif phase == "backward" and not described:
            factors = BACKWARD[sort]
        else:
            continue
        yield sort, _roofline(work, sort, phase, factors, rows, dtype, device)


def _roofline(
    work: Work, sort: str, phase: str, factors: tuple[float, float, float], rows: int,
    dtype: str, device: Device,
) -> float:  # fmt: skip
    """Return the larger of computing and moving, and what each operation costs beside it."""
    calls, more, further = factors
    count, flops, moved = work.count * calls, work.flops.at(rows) * more, work.moved.at(rows)
    moved *= further
    if not count:
        return 0.0
    share = device.efficiency
    bandwidth = device.moving * efficiency(share.get("other", ()), moved / count)
    computing = 0.0
    if flops and sort != "other":
        name = f"{sort} backward" if phase == "backward" else sort
        shares = share.get(name) or share.get(sort, ())
        computing = flops / (device.peak(dtype) * efficiency(shares, flops / count))
    return max(computing, moved / bandwidth) + count * device.overhead


def efficiency(shares: Shares, size: float) -> float:
    """Return the share that an operation of a size reaches: 1 if none are known.

    Between two sizes it goes by their logarithm; beyond the ends it stays.

    Example:
        >>> efficiency(((1e6, 0.2), (1e8, 0.6)), 1e7)
        0.4
    """
    if not shares:
        return 1.0
    at = bisect_right(shares, (size, math.inf))
    if at in (0, len(shares)):
        return shares[min(at, len(shares) - 1)][1]
    (below, low), (above, high) = shares[at - 1], shares[at]
    return low + (high - low) * math.log(size / below) / math.log(above / below)


def _messages(
    sents: Iterable[Sent], rows: int, attention: float, computing: float, cluster: Cluster,
    routes: dict[str, Route],
) -> tuple[dict[str, float], dict[str, float]]:  # fmt: skip
    """Return seconds of messages by axis, those that are waited for and those that hide.

    Asynchronous ones of cp run beside the attention of what is there already, others beside all
    that the block computes, as far as the device can do both.
    """
    exposed: dict[str, float] = {}
    beside: dict[str, float] = {}
    for sent in sents:
        axis = "tp" if sent.axis == "etp" else sent.axis
        size = sent.bytes.at(rows)
        took = seconds(sent.operation, sent.count, size, routes[axis], cluster)
        # A ring's keys and values travel while those before them are attended to.
        passes = not sent.awaited or (axis == "cp" and sent.operation == "send")
        into = beside if passes else exposed
        into[axis] = into.get(axis, 0.0) + took
    hidden: dict[str, float] = {}
    for axis, took in beside.items():
        room = attention if axis == "cp" else computing
        hidden[axis] = min(took * cluster.device.hides, room)
        exposed[axis] = exposed.get(axis, 0.0) + took - hidden[axis]
    return exposed, hidden


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
