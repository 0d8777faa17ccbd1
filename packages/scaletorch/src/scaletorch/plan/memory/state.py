"""Bytes of a rank's parameters, gradients and optimizer, and of buckets on their way."""

from __future__ import annotations

from typing import NamedTuple

from ..held import Group, Known
from ..layout import Layout
from ..stages import SPLIT

OPEN = 3  # buckets that a backward fills with ZeRO 2 before the first has left
GATHERED = 4  # layers that are whole with ZeRO 3: one that runs, the next, and gradients of two


class State(NamedTuple):
    """Bytes of a rank's parameters and of what goes with them.

    Attributes:
        parameters: Its shards.
        gradients: Where they are summed, from step to step.
        optimizer: The optimizer's state, and master weights.
        brought: Gradients or shards of them that the first backward makes.
        again: Shards that each later backward makes beside these.
        last: Shards that the last backward alone makes.
        start: What is whole of buckets or of parameters when a backward begins.
        inside: The same while its layers run.
        bucket: Of a bucket of these gradients.
        whole: Of all that come in buckets.
        ties: Gradients of tied weights that other stages send when a step ends.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    brought: int = 0
    again: int = 0
    last: int = 0
    start: int = 0
    inside: int = 0
    bucket: int = 0
    whole: int = 0
    ties: int = 0


def state(known: Known, layout: Layout, number: int) -> State:
    """Return what a rank keeps of parameters, gradients and the optimizer's state.

    Args:
        known: Of the description.
        layout: The layout.
        number: Of `known.numbers(layout)`.
    """
    grid, zero = layout.grid, layout.zero
    rounds = min(layout.micro_batches, 2) if zero == 2 else 0
    split = zero == 2 and layout.schedule in SPLIT
    key = "state", grid.tp, grid.ep, grid.etp, grid.cp * grid.dp, number, zero, rounds, split
    found: State | None = known.cache.get(key)
    if found is None:
        each = [
            _state(known, layout, group, grid.edp if group.axis == "edp" else grid.cp * grid.dp)
            for group in known.groups(layout, number)
        ]
        found = known.cache[key] = State(*map(sum, zip(*each, strict=True)))
    return found


def _state(known: Known, layout: Layout, group: Group, ranks: int) -> State:
    """Return what there is of parameters that are summed over so many ranks."""
    optimizer, item, zero = known.optimizer, group.item, layout.zero
    sums, whole = optimizer.sum_item or item, group.elements
    early = known.description.early
    if not zero or group.others:
        # Sums of another dtype are kept beside the gradients that the optimizer takes.
        gradients = whole * (item if sums == item else item + sums)
        gradients += whole * item * (group.others > 0 and sums == item and ranks > 1)
        states = whole * optimizer.moments * (optimizer.item or item)
        states += optimizer.per_tensor * group.tensors
        summed = layout.grid.cp * layout.grid.dp > 1 or ranks > 1
        stays = summed or bool(optimizer.sum_item) or not early
        return State(
            whole * item, gradients * stays, states, gradients * (not stays),
            ties=whole * item * group.others,
        )  # fmt: skip
    own = -(-whole // ranks)
    master = item if zero == 3 else max(item, 4)
    states = own * optimizer.moments * (optimizer.item or master)
    states += own * master * (master != item)
    states += optimizer.per_tensor * (group.tensors if zero == 3 else -(-group.tensors // ranks))
    if zero == 3:
        layer, rest = group.layer * item, group.rest * item
        return State(
            own * item, own * item * (not early), states, own * item * early,
            start=rest + layer, inside=rest + GATHERED * layer,
        )  # fmt: skip
    bucket = group.bucket(optimizer.bucket_size) * sums
    coming = 0
    if ranks > 1:  # into memory of a shard, or of a bucket where sums are made here
        here = not optimizer.native or sums == 2
        coming = group.bucket(optimizer.bucket_size) * sums // (1 if here else ranks)
    if zero == 1 and not early:  # other programs have shards from the start
        return State(whole * item, whole * sums + own * master, states)
    if zero == 1:
        return State(whole * item, whole * sums, states, last=own * master, inside=coming,
                     bucket=bucket, whole=whole * sums)  # fmt: skip
    shards = own * master * (2 if layout.schedule in SPLIT and ranks > 1 else 1)
    return State(
        whole * item, 0, states, shards, own * master,
        inside=group.in_a_row(OPEN, optimizer.bucket_size) * sums + coming,
        bucket=bucket, whole=whole * sums,
    )  # fmt: skip
