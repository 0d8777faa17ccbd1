"""Seconds at the end of a step: gradients that are summed, shards that are gathered, the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..clusters import Cluster
from ..held import Group
from ..layout import Layout
from .messages import Route, seconds

# An update of Adam reads parameter, gradient and two moments, and writes all but the gradient.
_UPDATED = 7


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


def ended(
    groups: Sequence[Group], layout: Layout, forward: float, backward: float, cluster: Cluster,
    routes: Mapping[str, Route],
) -> Ended:  # fmt: skip
    """Return what follows a rank's pipeline.

    Buckets leave as backward fills them, one after another: all but the last hide behind what is
    left of the backward, as far as there is any. Tied weights' gradients are sent between stages.

    Args:
        groups: Its parameters.
        layout: The layout.
        forward: Seconds that it computes forward for a micro-batch.
        backward: And backward.
        cluster: The cluster.
        routes: By axis.
    """
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    update, device = 0.0, cluster.device
    for axis, own in _by_axis(groups).items():
        way = routes[axis]
        size = own.elements * own.item
        shards = way.ranks if layout.zero else 1
        update += _UPDATED * size / shards / (device.updating or device.moving)
        update += own.tensors * device.overhead
        if way.ranks == 1 or not own.elements:
            continue
        over = size * (way.ranks - 1) / way.ranks
        buckets = own.buckets()
        call, sent = ("reduce_scatter", over) if layout.zero else ("all_reduce", 2 * over)
        took = seconds(call, buckets, sent, way, cluster)
        beside = min(took, backward) * (buckets - 1) / buckets * device.hides
        rounds = layout.micro_batches if layout.zero >= 2 else 1
        exposed[axis] = (took - beside) * rounds
        hidden[axis] = beside * rounds
        if layout.zero:
            gather = seconds("all_gather", buckets, over, way, cluster)
            # ZeRO 3 gathers before the forward and the backward of every micro-batch.
            times, each = (1, (0.0,)) if layout.zero < 3 else (rounds, (forward, backward))
            for computing in each:
                covered = min(gather, computing) * device.hides
                exposed[axis] += (gather - covered) * times
                hidden[axis] += covered * times
    for own in groups:
        if own.others:
            size = own.elements * own.item * own.others
            waited = seconds("send", 2 * own.others * own.tensors, size, routes["pp"], cluster)
            exposed["pp"] = exposed.get("pp", 0.0) + waited
    return Ended(exposed, hidden, update)


def _by_axis(groups: Sequence[Group]) -> dict[str, Group]:
    """Return all parameters that are summed over the same ranks as one group."""
    found: dict[str, Group] = {}
    for each in groups:
        own = found.get(each.axis)
        if own is None:
            found[each.axis] = each
        else:  # of another item, or tied
            elements = own.elements + each.elements
            size = own.elements * own.item + each.elements * each.item
            found[each.axis] = own._replace(
                elements=elements, item=-(-size // elements), tensors=own.tensors + each.tensors
            )
    return found
