"""Seconds of a block's forward and backward on a rank: a roofline for each sort of operation."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..clusters import Cluster, Device, Shares
from ..description import Behaviour, Work
from .messages import Route, seconds

SORTS = ("matmul", "attention", "other")


class Seconds(NamedTuple):
    """Seconds that a rank spends.

    Attributes:
        computing: Without messages.
        weights: Of that, on gradients of weights, which some schedules put off.
        exposed: Messages that it waits for, by axis.
        hidden: Messages that run beside computation, by axis.
    """

    computing: float = 0.0
    weights: float = 0.0
    exposed: Mapping[str, float] = {}
    hidden: Mapping[str, float] = {}

    @property
    def total(self) -> float:
        """With the messages that it waits for."""
        return self.computing + sum(self.exposed.values())


def summed(parts: Iterable[tuple[Seconds, float]]) -> Seconds:
    """Add up seconds, each so many times."""
    computing = weights = 0.0
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    for part, times in parts:
        computing += part.computing * times
        weights += part.weights * times
        for total, own in ((exposed, part.exposed), (hidden, part.hidden)):
            for axis, each in own.items():
                total[axis] = total.get(axis, 0.0) + each * times
    return Seconds(computing, weights, exposed, hidden)


def block_seconds(
    behaviour: Behaviour, phase: str, rows: int, dtype: str, cluster: Cluster,
    routes: Mapping[str, Route],
) -> Seconds:  # fmt: skip
    """Return the seconds of a block in a phase, "forward" or "backward", for a micro-batch.

    Asynchronous messages of cp run beside the attention of the rank's own positions, others beside
    all that the block computes, as far as the device can do both.
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
            axis = "tp" if sent.axis == "etp" else sent.axis
            took = seconds(sent.operation, sent.count, sent.bytes.at(rows), routes[axis], cluster)
            # A ring's keys and values travel while those before them are attended to.
            passes = not sent.awaited or (axis == "cp" and sent.operation == "send")
            into = beside if passes else exposed
            into[axis] = into.get(axis, 0.0) + took
    hidden: dict[str, float] = {}
    for axis, took in beside.items():
        room = times["attention"] if axis == "cp" else computing
        hidden[axis] = min(took * cluster.device.hides, room)
        exposed[axis] = exposed.get(axis, 0.0) + took - hidden[axis]
    # Of the two products of a backward one is for the weights.
    weights = times["matmul"] / 2 if phase == "backward" else 0.0
    return Seconds(computing, weights, exposed, hidden)


def _roofline(work: Work, sort: str, rows: int, dtype: str, device: Device) -> float:
    """Return the larger of computing and moving, and the overhead of each operation."""
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
    """Return the share of the peak that an operation of a size reaches: 1 if none are known.

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
