"""The tables of gradients, steps and memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from scaletorch.dist.testing import worst

from ..harness.tables import MIB, largest, ratio, table
from .checks import Plan
from .measure import Figures, Memory
from .ways import ALONE, OURS

Ranks = Sequence[Mapping[str, Figures]]  # measurements by rank and way


def slowest(ranks: Ranks, name: str, clock: str = "wall") -> list[float]:
    """Return the milliseconds of each repeat, on the rank with more "wall" or "cpu" time."""
    of_ranks = [rank[name].steps for rank in ranks]
    return [1e3 * each for each in largest(of_ranks, attrgetter(clock))]


def best_alternative(ranks: Ranks) -> str:
    """Return the fastest way other than ours that makes gradients equal."""
    peers = [name for name in ranks[0] if name != ALONE and not name.startswith(OURS)]
    return min(peers, key=lambda name: statistics.median(slowest(ranks, name)))


def times(plan: Plan, ranks: Ranks, links: str = "") -> str:
    """Return the table of times, errors and communication."""
    best = best_alternative(ranks)
    compared = "parameters" if plan.trains else "gradients"
    columns = [
        "way", "ms", "/ compute alone", f"/ {best}", "CPU ms", f"{compared} differ",
        "communication ms", "hidden",
    ]  # fmt: skip
    if plan.trains:
        columns.append("state MiB")
    title = f"{plan.size}, {plan.repeats} repeats{links}"
    return f"\n### {title}\n\n{table(columns, _time_rows(plan, ranks, best))}"


def _time_rows(plan: Plan, ranks: Ranks, best: str) -> Iterator[Sequence[str]]:
    for name in ranks[0]:
        walls, busy = slowest(ranks, name), slowest(ranks, name, "cpu")
        against = [ratio(walls, slowest(ranks, other)) for other in (ALONE, best)]
        error = worst(rank[name].error for rank in ranks)
        cells = [
            name, f"{statistics.median(walls):.1f}", *against, f"{statistics.median(busy):.1f}",
            "" if name == ALONE else f"{error:.1e}", *_hidden(ranks, name),
        ]  # fmt: skip
        if plan.trains:
            cells.append(f"{max(rank[name].state for rank in ranks) / MIB:.1f}")
        yield cells


def _hidden(ranks: Ranks, name: str) -> tuple[str, str]:
    """Return the milliseconds of communication, and its hidden share."""
    found = [each for rank in ranks for each in rank[name].hidden if each.communication]
    if not found:
        return "", ""
    communication = statistics.median(each.communication for each in found)
    share = statistics.median(each.behind / each.communication for each in found)
    return f"{1e3 * communication:.1f}", f"{share:.0%}"


def peaks(plan: Plan, found: Mapping[str, Sequence[Memory]]) -> str:
    """Return the table of peak memory."""
    columns = [
        "way",
        "MiB above the model",
        "in the third step",
        "above compute alone",
        "in models",
    ]
    title = f"memory: {plan.table}, {plan.size}"
    return f"\n### {title}\n\n{table(columns, _peak_rows(found))}"


def _peak_rows(found: Mapping[str, Sequence[Memory]]) -> Iterator[Sequence[str]]:
    alone = max(rank.steady for rank in found[ALONE])
    for name, ranks in found.items():
        above, steady = (
            max(sizes) for sizes in zip(*((r.above, r.steady) for r in ranks), strict=True)
        )
        more = steady - alone
        cells = [f"{size / MIB:.1f}" for size in (above, steady, more)]
        yield [name, *cells, f"{more / ranks[0].model:.2f}"]
