"""Seconds of a block's forward and backward on a rank, by a roofline for each kind of operation."""

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
    """Seconds of a rank.

    Attributes:
        computing: Computation without messages.
        weights: The share of it for weight gradients, which some schedules defer.
        exposed: Messages that computation waits for, by axis.
        hidden: Messages that overlap with computation, by axis.
    """

    computing: float = 0.0
    weights: float = 0.0
    exposed: Mapping[str, float] = {}
    hidden: Mapping[str, float] = {}

    @property
    def total(self) -> float:
        """Computation and exposed messages."""
        return self.computing + sum(self.exposed.values())


def summed(parts: Iterable[tuple[Seconds, float]]) -> Seconds:
    """Return the weighted sum of pairs (seconds, factor)."""
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
            axis = "tp" if sent.axis == "etp" else sent.axis
            took = seconds(sent.operation, sent.count, sent.bytes.at(rows), routes[axis], cluster)
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
    """Return the share of the peak that an operation of a size reaches; 1 if no shares are known.

    Shares are interpolated by the logarithm of the size, and constant beyond the ends.

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
