"""What a plan says of each rank of a case, and where the ranks differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import mul

import torch

from scaletorch.parallel.pg_manager import Grid
from scaletorch.plan import Layout, Optimizer
from scaletorch.plan.holding.holdings import Holdings
from scaletorch.plan.holding.live import halved
from scaletorch.plan.memory import kept_by_autograd, memory
from scaletorch.plan.memory.busy import busy
from scaletorch.plan.memory.ranks import fullest_moment
from scaletorch.plan.memory.running import running
from scaletorch.plan.memory.state import state
from scaletorch.plan.traffic import calls

from .drawing import Case
from .models import described, described_on_gloo
from .peaks import Peak
from .ranks import AXES, Sends

Found = tuple[list[int], Sends, Sends]


def expected(case: Case, holdings: Holdings, rank: int) -> Found:
    """Return what a rank of a case holds, its counts and its bytes, by the plan."""
    grid, layout = case.layout.grid, case.layout
    place = grid.coordinates(rank)
    number = holdings.numbers(layout)[place.pp]
    replica = place.dp * grid.cp + place.cp, grid.expert_coordinates(rank).edp
    halves = halved(layout.schedule, grid.pp, layout.micro_batches)[place.pp]
    held = state(holdings, layout, number, place.tp, replica, halves)
    counts, sizes = Counter(), Counter()
    for each in calls(holdings, layout, place.pp, place.tp):
        own = _first(grid, each.axis, rank), each.operation
        counts[own] += each.count
        sizes[own] += each.bytes
    return [held.parameters, held.gradients, held.optimizer], counts, sizes


def differences(case: Case, ranks: list[Found]) -> Iterator[str]:
    """Yield what ranks have found otherwise than planned; what experts send goes by routes."""
    holdings = Holdings(described(case), Optimizer(sum_item=case.sum_item, native=False))
    for rank, (held, counts, sizes) in enumerate(ranks):
        planned = expected(case, holdings, rank)
        for what, own, found in zip(
            ("parameters", "gradients", "state"), planned[0], held, strict=True
        ):
            if own != found:
                yield f"{case}: rank {rank} has {found} bytes of {what}, planned {own}"
        for what, own, found in (("calls", planned[1], counts), ("bytes", planned[2], sizes)):
            for key in sorted({*own, *found}):
                if own[key] != found[key] and not _by_routes(case, key[0], rank):
                    yield f"{case}: rank {rank} {found[key]} {what} of {key}, planned {own[key]}"


def higher(case: Case, ranks: list[Peak]) -> Iterator[str]:
    """Yield what autograd keeps on ranks otherwise than planned, and peaks that are 2 % off."""
    layout = case.layout
    holdings = Holdings(described_on_gloo(case), Optimizer(native=False))
    planned = memory(holdings.description, layout, holdings=holdings)
    for rank, own in enumerate(ranks):
        place = layout.grid.coordinates(rank).pp
        kept = kept_by_autograd(holdings.description, layout)[place]  # none of halves
        if own.kept not in (None, kept):
            yield f"{case}: autograd keeps {own.kept} bytes on rank {rank}, planned {kept}"
        found = planned[place].total + random_states(holdings, layout, place)
        most = own.before + own.taken
        less = _fewer_shards(holdings, layout, rank)
        if not (0.98 * (most - own.rest) <= found and found - less <= 1.02 * most):
            yield f"{case}: rank {rank} holds {own}, planned {planned[place]}: {found}"


def _fewer_shards(holdings: Holdings, layout: Layout, rank: int) -> int:
    """Return how much less a rank has of gradients than the fullest of those that share them."""
    place, grid = layout.grid.coordinates(rank), layout.grid
    replica = place.dp * grid.cp + place.cp, grid.expert_coordinates(rank).edp
    halves = halved(layout.schedule, grid.pp, layout.micro_batches)[place.pp]
    number = holdings.numbers(layout)[place.pp]
    most, own = (
        state(holdings, layout, number, place.tp, each, halves) for each in (None, replica)
    )
    return most.gradients - own.gradients


def random_states(holdings: Holdings, layout: Layout, place: int) -> int:
    """Return bytes of the host's random states that layers keep to run again at a rank's peak.

    They are no part of a plan: of a device's memory they take nothing.
    """
    if layout.recompute != "full":
        return 0
    ranks = busy(holdings, layout)
    rank = ranks.each[ranks.places[place]]
    (own,) = running(holdings, layout, [rank[:2]])
    kept = fullest_moment(own, rank.moments)[1].kept
    layers = [sum(n for k, n in c.items() if k in holdings.layers)
              for c in holdings.chunks(rank.number)]  # fmt: skip
    return torch.get_rng_state().nbytes * sum(map(mul, kept, layers))


def _by_routes(case: Case, axis: str, rank: int) -> bool:
    grid = case.layout.grid
    same = axis in {_first(grid, each, rank) for each in ("ep", "tp")}
    return case.family == "mixture" and same


def _first(grid: Grid, axis: str, rank: int) -> str:
    """Return the first axis with the same ranks."""
    members = [next(g for g in grid.groups(each) if rank in g) for each in (axis, *AXES)]
    return next(a for a, own in zip(AXES, members[1:], strict=True) if own == members[0])
