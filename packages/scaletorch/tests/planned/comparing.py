"""What a plan says of each rank of a case, and where the ranks differ by more than it allows."""

from __future__ import annotations

from collections.abc import Iterator
from operator import mul

import torch

from scaletorch.plan import Layout, Optimizer
from scaletorch.plan.facts import Facts, alive
from scaletorch.plan.memory import memory

from .cases import Case, described
from .peaks import Peak

CLOSE = 0.03  # of what ranks hold
ROOM = 2**15  # bytes of a peak that no plan has: heads of messages, flags, blocks of the allocator
SMALL = 4096  # bytes that may be missing besides: padding, flags, states of single tensors


def differences(case: Case, ranks: list[Peak]) -> Iterator[str]:
    """Yield parameters and state that ranks hold otherwise than planned."""
    known = Facts(described(case), Optimizer(sum_item=case.sum_item, native=False))
    planned = memory(known.description, case.layout, facts=known)
    for rank, found in enumerate(ranks):
        own = planned[case.layout.grid.coordinates(rank).pp]
        if not (close(own.parameters, found.held[0]) and close(own.optimizer, found.held[2])):
            yield f"{case}: rank {rank} holds {found.held}, planned {own}"


def close(planned: int, found: int) -> bool:
    """Return whether a plan is as near as it says."""
    return abs(planned - found) <= CLOSE * found + SMALL


def higher(case: Case, ranks: list[Peak]) -> Iterator[str]:
    """Yield ranks whose peak is too far from the planned one."""
    layout = case.layout
    known = Facts(described(case), Optimizer(native=False))
    planned = memory(known.description, layout, facts=known)
    for rank, own in enumerate(ranks):
        place = layout.grid.coordinates(rank).pp
        found = planned[place].total + random_states(known, layout, place)
        most = sum(own.held) + own.taken
        # What is full of buckets is known less well, and when gloo frees what it gathers.
        off = 2 * CLOSE if layout.zero or layout.sequence_parallel else CLOSE
        if not (1 - off) * (most - own.rest) - ROOM <= found <= (1 + off) * most + ROOM:
            yield f"{case}: rank {rank} holds {own}, planned {planned[place]}: {found}"


def random_states(known: Facts, layout: Layout, place: int) -> int:
    """Return bytes of the host's random states that layers keep to run again.

    They are no part of a plan: of a device's memory they take nothing.
    """
    if layout.recompute != "full":
        return 0
    chunks = known.contents[known.pipeline(layout)[0][place]].chunks
    layers = [sum(n for kind, n in runs if kind in known.layers) for runs in chunks]
    return torch.get_rng_state().nbytes * max(
        sum(map(mul, moment.whole, layers)) for moment in alive(layout, place)
    )
