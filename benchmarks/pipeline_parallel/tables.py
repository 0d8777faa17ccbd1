"""Tables of steps, of host costs and of slow links."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from ..harness.tables import MIB, head, largest, ratio, row
from ..harness.turns import Spent
from .measure import ALONE, Figures, Fill, Key
from .models import Size
from .ways import CONTENDERS

Ranks = Sequence[dict[Key, Figures]]  # measurements by rank and way
OURS, TORCH = CONTENDERS


def schedules(ranks: Ranks) -> list[str]:
    """Return the schedules that were run."""
    return list(dict.fromkeys(name for name, who in ranks[0] if who))


def walls(ranks: Ranks, key: Key) -> list[float]:
    """Return the milliseconds of each repeat, on the slowest rank."""
    return [1e3 * each for each in largest([rank[key].steps for rank in ranks], attrgetter("wall"))]


def print_head(*columns: str) -> None:
    """Print a table's head."""
    print(f"\n{head(*columns)}")


def print_row(*cells: object) -> None:
    """Print a table's row."""
    print(row(*cells), flush=True)


def times(ranks: Ranks, name: str) -> tuple[str, str, str]:
    """Return the time of ours, of torch's, and their ratio, as text."""
    ours, theirs = walls(ranks, (name, OURS)), walls(ranks, (name, TORCH))
    middles = (f"{statistics.median(found):.1f}" for found in (ours, theirs))
    return *middles, ratio(ours, theirs)  # type: ignore[return-value]


def median(fills: Iterable[Fill], value: Callable[[Fill], float]) -> float:
    """Return a median over recorded steps."""
    return statistics.median(map(value, fills))


def title(size: Size, ranks: Ranks, more: str = "") -> None:
    """Print a title, and one process's time."""
    alone = walls(ranks[:1], ALONE)
    print(f"\n{len(ranks)} ranks{more}, {size}, {len(alone)} repeats")
    print(f"One process of one thread takes {statistics.median(alone):.1f} ms.")


def show_steps(size: Size, ranks: Ranks) -> None:
    """Print times, gradients and memory of one size."""
    title(size, ranks)
    both = "ours / torch's"
    print_head("schedule", "ours ms", "torch's ms", both, "bits of one process", "live", "peak MiB")
    for name in schedules(ranks):
        of_ways = [[rank[name, who] for rank in ranks] for who in (OURS, TORCH)]
        bits = ("yes" if all(f.equal for f in way) else "no" for way in of_ways)
        live = (", ".join(f"{f.live:g}" for f in way) for way in of_ways)
        peaks = (f"{max(f.peak for f in way) / MIB:.1f}" for way in of_ways)
        print_row(name, *times(ranks, name), *map(" / ".join, (bits, live, peaks)))


def show_fill(ranks: Ranks) -> None:
    """Print the use of the ranks, measured and simulated."""
    print_head(
        "schedule", "ours x simulated", "torch's x simulated",
        "our bubble, simulated", "torch's bubble, simulated",
    )  # fmt: skip
    for name in schedules(ranks):
        fills = [ranks[0][name, who].fills for who in (OURS, TORCH)]
        over = [f"{median(way, lambda f: f.ratio):.3f}" for way in fills]
        bubbles = [
            f"{median(way, lambda f: f.bubble):.1%}, {median(way, lambda f: f.least):.1%}"
            for way in fills
        ]
        print_row(name, *over, *bubbles)


def of_actions(ranks: Ranks, key: Key, value: Callable[[Spent], float]) -> list[float]:
    """Return each repeat's microseconds of all ranks over all ranks' actions."""
    count = ranks[0][key].fills[0].actions
    repeats = zip(*(rank[key].steps for rank in ranks), strict=True)
    return [1e6 * sum(map(value, steps)) / count for steps in repeats]


def show_hosts(size: Size, ranks: Ranks) -> None:
    """Print the hosts' cost of actions."""
    title(size, ranks)
    work = statistics.median(step.cpu for step in ranks[0][ALONE].steps)
    actions = 2 * size.micro_batches * len(ranks)
    print(f"{1e6 * work / actions:.0f} us of CPU are an F or B of one of {len(ranks)} stages.")
    both = "ours / torch's"
    print_head(
        "schedule", "actions", "ours ms", "torch's ms", both, "CPU us", both, "main us", both
    )
    for name in schedules(ranks):
        keys = (name, OURS), (name, TORCH)
        cells = [" / ".join(str(ranks[0][key].fills[0].actions) for key in keys)]
        cells += times(ranks, name)
        for value in (lambda step: step.cpu, lambda step: step.main):
            own, torchs = (of_actions(ranks, key, value) for key in keys)
            cells.append(f"{statistics.median(own):.0f} / {statistics.median(torchs):.0f}")
            cells.append(ratio(own, torchs))
        print_row(name, *cells)


def show_slow(size: Size, found: Mapping[float, Ranks]) -> None:
    """Print times of one size by latency."""
    near, far = found[min(found)], found[max(found)]
    title(size, near, " on slow links")
    columns = [
        f"{1e3 * seconds:g} ms: {what}"
        for seconds in found
        for what in ("ours", "torch's", "ours / torch's")
    ]
    last = f"{1e3 * max(found):g} ms"
    print_head(
        "schedule", *columns, "added: ours", "torch's", f"{last}: ours x simulated", "torch's"
    )
    for name in schedules(near):
        keys = (name, OURS), (name, TORCH)
        cells = [cell for ranks in found.values() for cell in times(ranks, name)]
        for key in keys:
            added = statistics.median(walls(far, key)) - statistics.median(walls(near, key))
            cells.append(f"{added:.1f}")
        cells += [f"{median(far[0][key].fills, lambda f: f.ratio):.3f}" for key in keys]
        print_row(name, *cells)
