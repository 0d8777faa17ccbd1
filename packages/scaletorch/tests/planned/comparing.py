"""What a plan says of each rank of a case, and where the ranks differ by more than it allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import mul

import torch

from scaletorch.parallel.pg_manager import Grid
from scaletorch.plan import Layout, Memory, Optimizer
from scaletorch.plan.held import Known
from scaletorch.plan.memory import chunks_of, memory
from scaletorch.plan.stages import SPLIT, alive
from scaletorch.plan.traffic import ranks_send

from .drawing import Case
from .models import described, described_on_gloo
from .peaks import Peak
from .ranks import AXES, Sends

CLOSE = 0.03  # of what ranks hold and send
# Experts that no other rank has, with ZeRO 2 and halves of backwards: planned larger than they are.
HALVES = 0.15
ROOM = 2**15  # bytes of a peak that no plan has: heads of messages, flags, blocks of the allocator
SMALL = 4096  # bytes that may be missing besides: padding, flags, states of single tensors
Found = tuple[list[int], Sends, Sends]


def expected(case: Case, known: Known, rank: int) -> tuple[Memory, Sends]:
    """Return what the fullest rank at a rank's place of the pipeline holds and sends, by axis."""
    grid, layout = case.layout.grid, case.layout
    place = grid.coordinates(rank).pp
    sizes = Counter()
    for each in ranks_send(known, layout)[place]:
        sizes[_first(grid, each.axis, rank), each.operation] += each.bytes
    return memory(known.description, layout, known=known)[place], sizes


def differences(case: Case, ranks: list[Found]) -> Iterator[str]:
    """Yield what ranks have found otherwise than planned; what experts send goes by routes."""
    known = Known(described(case), Optimizer(sum_item=case.sum_item, native=False))
    for rank, (held, _, sizes) in enumerate(ranks):
        planned, sent = expected(case, known, rank)
        for what, own, found in (
            ("parameters", planned.parameters, held[0]), ("state", planned.optimizer, held[2]),
        ):  # fmt: skip
            if not close(own, found):
                yield f"{case}: rank {rank} has {found} bytes of {what}, planned {own}"
        for key in sorted({*sent, *sizes}):
            if not close(sent[key], sizes[key]) and not _by_routes(case, key[0], rank):
                yield f"{case}: rank {rank} {sizes[key]} bytes of {key}, planned {sent[key]}"


def close(planned: int, found: int) -> bool:
    """Return whether a plan is as near as it says."""
    return abs(planned - found) <= CLOSE * found + SMALL


def higher(case: Case, ranks: list[Peak]) -> Iterator[str]:
    """Yield what autograd keeps on ranks otherwise than planned, and peaks that are too far off."""
    layout = case.layout
    known = Known(described_on_gloo(case), Optimizer(native=False))
    planned = memory(known.description, layout, known=known)
    for rank, own in enumerate(ranks):
        place = layout.grid.coordinates(rank).pp
        kept = kept_by_autograd(known, layout, place)
        if own.kept is not None and not close(kept, own.kept):
            yield f"{case}: autograd keeps {own.kept} bytes on rank {rank}, planned {kept}"
        found = planned[place].total + random_states(known, layout, place)
        most = own.before + own.taken
        # What is full of buckets is known less well, and when gloo frees what it gathers.
        off = 2 * CLOSE if layout.zero or layout.sequence_parallel else CLOSE
        halves = case.family.endswith("mixture") and layout.zero == 2 and layout.schedule in SPLIT
        more = HALVES if halves else off
        if not (1 - off) * (most - own.rest) - ROOM <= found <= (1 + more) * most + ROOM:
            yield f"{case}: rank {rank} holds {own}, planned {planned[place]}: {found}"


def kept_by_autograd(known: Known, layout: Layout, place: int) -> int:
    """Return the most bytes that autograd keeps: none of what halves of backwards leave."""
    chunks = chunks_of(known, layout, known.numbers(layout)[place])
    return max(
        sum(n * own.kept for n, own in zip(moment.whole, chunks, strict=True))
        for moment in alive(layout, place)
    )


def random_states(known: Known, layout: Layout, place: int) -> int:
    """Return bytes of the host's random states that layers keep to run again.

    They are no part of a plan: of a device's memory they take nothing.
    """
    if layout.recompute != "full":
        return 0
    chunks = known.content(known.numbers(layout)[place]).chunks
    layers = [sum(n for kind, n in runs if kind in known.layers) for runs in chunks]
    return torch.get_rng_state().nbytes * max(
        sum(map(mul, moment.whole, layers)) for moment in alive(layout, place)
    )


def _by_routes(case: Case, axis: str, rank: int) -> bool:
    grid = case.layout.grid
    same = axis in {_first(grid, each, rank) for each in ("ep", "tp")}
    return case.family == "mixture" and same


def _first(grid: Grid, axis: str, rank: int) -> str:
    """Return the first axis with the same ranks."""
    members = [next(g for g in grid.groups(each) if rank in g) for each in (axis, *AXES)]
    return next(a for a, own in zip(AXES, members[1:], strict=True) if own == members[0])
