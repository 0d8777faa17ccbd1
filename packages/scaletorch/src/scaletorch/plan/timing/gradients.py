"""Seconds at the end of a step: gradients that are summed, shards that are gathered, the update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..clusters import Cluster
from ..description import Parameter
from ..layout import Layout
from .messages import Route, seconds

BUCKET, SMALL = 2**24, 2**18  # elements of a bucket, at most and at least
_BUCKETS = 8  # of a model, unless ranks share memory: see `fill_buckets`
_BUCKETS_OF_HOST = 3
# An update of Adam reads parameter, gradient and two moments, and writes all but the gradient.
_UPDATED = 7


class Held(NamedTuple):
    """Parameters that a rank holds.

    Attributes:
        elements: How many.
        size: Their bytes.
        tensors: How many tensors they are.
    """

    elements: int = 0
    size: int = 0
    tensors: int = 0


class Ended(NamedTuple):
    """What comes on top of the pipeline on a rank, in seconds.

    Attributes:
        exposed: Messages that are waited for, by axis.
        hidden: Those beside computation.
        update: The optimizer's.
    """

    exposed: dict[str, float]
    hidden: dict[str, float]
    update: float


def held(parameters: Iterable[tuple[Parameter, int]]) -> dict[str, Held]:
    """Return what the fullest tp rank holds, by the axis over which gradients are summed.

    Args:
        parameters: Each with the number of blocks that have one like it.
    """
    found = {"cp_dp": Held(), "edp": Held()}
    for each, times in parameters:
        axis = "edp" if each.expert else "cp_dp"
        elements, own = max(each.local) * times, found[axis]
        found[axis] = Held(
            own.elements + elements, own.size + elements * each.item, own.tensors + times
        )
    return found


def ended(
    owned: Mapping[str, Held], layout: Layout, forward: float, backward: float, cluster: Cluster,
    routes: Mapping[str, Route],
) -> Ended:  # fmt: skip
    """Return what follows a rank's pipeline.

    Buckets leave as backward fills them, one after another: all but the last hide behind what is
    left of the backward, as far as there is any.

    Args:
        owned: Its parameters, of `held`.
        layout: The layout.
        forward: Seconds that it computes forward for a micro-batch.
        backward: And backward.
        cluster: The cluster.
        routes: By axis.
    """
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    update, device = 0.0, cluster.device
    for axis, own in owned.items():
        way = routes[axis]
        replicas = way.ranks
        shards = replicas if layout.zero else 1
        update += _UPDATED * own.size / shards / (device.updating or device.moving)
        update += own.tensors * device.overhead
        if replicas == 1 or not own.elements:
            continue
        over = own.size * (replicas - 1) / replicas
        buckets = _buckets(own.elements, cluster)
        call, sent = ("reduce_scatter", over) if layout.zero else ("all_reduce", 2 * over)
        took = seconds(call, buckets, sent, way, cluster)
        beside = min(took, backward) * (buckets - 1) / buckets * device.hides
        rounds = layout.micro_batches if layout.zero >= 2 else 1
        exposed[axis] = (took - beside) * rounds
        hidden[axis] = beside * rounds
        if layout.zero:
            gather = seconds("all_gather", buckets, over, way, cluster)
            if layout.zero < 3:
                exposed[axis] += gather
            else:
                _gathered(axis, gather, layout, (forward, backward), device.hides, exposed, hidden)
    return Ended(exposed, hidden, update)


def _gathered(
    axis: str, gather: float, layout: Layout, computing: tuple[float, float], hides: float,
    exposed: dict[str, float], hidden: dict[str, float],
) -> None:  # fmt: skip
    """Add what ZeRO 3 gathers before the forward and the backward of every micro-batch."""
    for beside in computing:
        covered = min(gather, beside) * hides
        exposed[axis] += (gather - covered) * layout.micro_batches
        hidden[axis] += covered * layout.micro_batches


def _buckets(elements: int, cluster: Cluster) -> int:
    least = _BUCKETS_OF_HOST if cluster.cores else _BUCKETS
    return math.ceil(elements / min(BUCKET, max(elements // least, SMALL)))
