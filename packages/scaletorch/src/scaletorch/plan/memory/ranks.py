"""Bytes on the ranks of a layout: what `parallelize` and `shard_optimizer` keep, and autograd."""

from __future__ import annotations

from typing import NamedTuple

from ..description import Description
from ..estimate import Memory
from ..holding import Holdings, Optimizer
from ..holding.live import SPLIT, Before, Live, fullest, halved, most_live
from ..holding.under_way import UnderWay, under_way
from ..layout import Layout
from .passing import Messages, activations, left_of, messages, passed_on, working
from .state import State, state

Place = tuple[int, tuple[bool, ...], Live, tuple[UnderWay, ...]]  # of a pipeline, but for its like


def memory(
    description: Description,
    layout: Layout,
    optimizer: Optimizer | None = None,
    *,
    holdings: Holdings | None = None,
) -> tuple[Memory, ...]:
    """Return the bytes of the fullest rank at each place of the pipeline.

    Of ranks that differ in tp or ep alone it is the one with the most parameters; of those that
    share an optimizer's state the first, whose shards are never the smaller ones.

    Args:
        description: The model.
        layout: The layout; with `zero` 3 as `fully_shard` of torch has it, a block at a time.
        optimizer: What is kept for each parameter.
        holdings: Of the same description and optimizer, to work out nothing twice.

    Raises:
        InvalidArgumentError: The model cannot be cut so, or has fewer layers than stages.
    """
    known = holdings or Holdings(description, optimizer)
    live = most_live(layout.schedule, layout.grid.pp, layout.micro_batches, layout.chunks)
    numbers = known.numbers(layout)
    halves = halved(layout.schedule, layout.grid.pp, layout.micro_batches)
    each_of = {key: fixed(known, layout, *key) for key in {*zip(numbers, halves, strict=True)}}
    found: dict[Place, Memory] = {}
    places = list(zip(numbers, halves, live, under_way(layout), strict=True))
    for each in places:
        if each not in found:
            number, half, own, moving = each
            sent = messages(known, layout, number, moving)
            found[each] = _memory(each_of[number, half], own, sent)
    return tuple(found[each] for each in places)


class Fixed(NamedTuple):
    """What a rank holds whatever micro-batches are under way, and of each of them, by chunk."""

    state: State
    kept: list[int]  # of a micro-batch, then of a half
    passed: list[int]
    working: dict[str, list[int]]  # while an action of a kind runs


def fixed(known: Holdings, layout: Layout, number: int, halves: tuple[bool, ...]) -> Fixed:
    """Return what a rank of this number holds whatever micro-batches are under way."""
    chunks = range(layout.chunks)
    kept = [activations(known, layout, number, chunk) for chunk in chunks]
    passed = [passed_on(known, layout, number, chunk) for chunk in chunks]
    held = state(known, layout, number, halves=halves)
    running = {"B": [working(known, layout, number, chunk) for chunk in chunks]}
    if layout.schedule in SPLIT:
        kept += [sum(size for _, size in left_of(known, layout, number, c)) for c in chunks]
        running["I"] = [working(known, layout, number, c, split=True) for c in chunks]
        running["W"] = known.latest(layout, number)
    return Fixed(held, kept, passed, running)


def fullest_before(own: Fixed, live: Live, moving: Messages) -> tuple[Before, int, int]:
    """Return when a rank holds the most, what works then, and the bytes of messages."""

    def size(before: Before) -> tuple[int, int]:
        key = before.kind, before.chunk
        messages = moving[key] if key in moving else max(moving.values())
        return own.working[before.kind][before.chunk], messages

    if len(live) == 1:
        return live[0], *size(live[0])
    return max(
        ((before, *size(before)) for before in live),
        key=lambda each: sum(_sizes(own, each[0])) + each[1] + each[2],
    )


def _memory(own: Fixed, live: Live, moving: Messages) -> Memory:
    before, running, messages = fullest_before(own, live, moving)
    kept, passed = _sizes(own, before)
    return Memory(*own.state[:3], kept, running, own.state.buffers + passed + messages)


def _sizes(own: Fixed, before: Before) -> tuple[int, int]:
    return fullest(before.moments, own.kept), fullest(before.moments, own.passed)
