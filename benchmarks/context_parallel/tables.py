"""Tables of attention over several ranks, compared with one process."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence

from ..harness.costs import ALONE, Ranks, slowest, waits
from ..harness.tables import MIB, ratio, table
from .measure import WAYS, Size

COLUMNS = [
    "way", "ms", "speed-up (quartiles)", "CPU ms, speed-up", "waiting", "bytes, - formula", "MiB",
]  # fmt: skip


def most(ranks: Ranks, name: str) -> float:
    """Return the MiB of the rank with more."""
    return max(rank[name].peak for rank in ranks) / MIB


def show(size: Size, ranks: Ranks) -> None:
    """Print the table of one size."""
    title = f"{size.length} positions, {size.what}"
    print(f"\n{title}\n\n{table(COLUMNS, rows(size, ranks))}", flush=True)


def rows(size: Size, ranks: Ranks) -> Iterator[Sequence[str]]:
    """Yield a row for each way."""
    walls, busy = (
        {name: [1e3 * each for each in found] for name, found in slowest(ranks, clock).items()}
        for clock in ("wall", "cpu")
    )
    for name in ranks[0]:
        cpu, wall = statistics.median(busy[name]), statistics.median(walls[name])
        bytes_sent = max(rank[name].sent for rank in ranks)
        more = f", {bytes_sent - WAYS[name].formula(size):+d}" if name in WAYS else ""
        yield [
            name, f"{wall:.1f}", ratio(walls[ALONE], walls[name], 2),
            f"{cpu:.1f}, {statistics.median(busy[ALONE]) / cpu:.2f}",
            f"{1e3 * waits(ranks, name) / wall:.1%}", f"{bytes_sent}{more}",
            f"{most(ranks, name):.1f}",
        ]  # fmt: skip


def show_growth(results: dict[Size, Ranks]) -> None:
    """Print the figures of each length, with the ratio to the length before."""
    for what in dict.fromkeys(size.what for size in results):
        sizes = sorted((size for size in results if size.what == what), key=lambda s: s.length)
        if len(sizes) == 1:
            continue
        columns = ["way", *(f"{size.length} positions" for size in sizes)]
        print(f"\nhow it grows: ms; MiB, {what}\n\n{table(columns, grown(results, sizes))}")


def grown(results: dict[Size, Ranks], sizes: list[Size]) -> Iterator[Sequence[str]]:
    """Yield a row for each way."""
    for name in results[sizes[0]][0]:
        times = [1e3 * statistics.median(slowest(results[size])[name]) for size in sizes]
        peaks = [most(results[size], name) for size in sizes]
        yield [name, *map("{}; {}".format, with_ratios(times), with_ratios(peaks))]


def with_ratios(figures: list[float]) -> list[str]:
    """Return figures with their ratio to the previous one."""
    ratios = [f", x {after / before:.2f}" for before, after in itertools.pairwise(figures)]
    return [f"{figure:.1f}{r}" for figure, r in zip(figures, ["", *ratios], strict=True)]
