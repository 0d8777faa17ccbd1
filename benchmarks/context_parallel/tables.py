"""Tables of attention over several ranks, compared with one process."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

from ..harness.tables import MIB, largest, ratio, table
from ..harness.turns import Spent

ALONE = "one process"
COLUMNS = [
    "way", "ms", "speed-up (quartiles)", "CPU ms, speed-up", "waiting", "bytes, - formula", "MiB",
]  # fmt: skip


@dataclass(frozen=True)
class Size:
    """A problem: forward and backward, or forward only."""

    length: int
    dtype: str
    backward: bool

    @property
    def what(self) -> str:
        """Dtype and passes in words."""
        return f"{self.dtype}, {'forward and backward' if self.backward else 'forward'}"


@dataclass(frozen=True)
class Figures:
    """Measurements of one way; a list has one entry for each repeat.

    Attributes:
        sent: Bytes sent.
        formula: Bytes to send by formula.
        peak: Peak bytes.
        times: Time of each repeat.
        exposed: Share of the time that is communication.
    """

    sent: int
    formula: int
    peak: int
    times: list[Spent]
    exposed: list[float]


Ranks: TypeAlias = list[dict[str, Figures]]  # of every rank, by way


def busier(ranks: Ranks, name: str, clock: str) -> list[float]:
    """Return the milliseconds of each repeat, on the rank with more "wall" or "cpu" time."""
    of_ranks = [rank[name].times for rank in ranks]
    return [1e3 * each for each in largest(of_ranks, attrgetter(clock))]


def most(ranks: Ranks, name: str) -> float:
    """Return the MiB of the rank with more."""
    return max(rank[name].peak for rank in ranks) / MIB


def show(size: Size, ranks: Ranks) -> None:
    """Print the table of one size."""
    print(f"\n{size.length} positions, {size.what}\n\n{table(COLUMNS, rows(ranks))}", flush=True)


def rows(ranks: Ranks) -> Iterator[Sequence[str]]:
    """Yield a row for each way."""
    alone, busy_alone = (busier(ranks[:1], ALONE, clock) for clock in ("wall", "cpu"))
    for name in ranks[0]:
        walls, busy = (busier(ranks, name, clock) for clock in ("wall", "cpu"))
        cpu = statistics.median(busy_alone) / statistics.median(busy)
        waits = map(min, zip(*(rank[name].exposed for rank in ranks), strict=True))
        sends = max((rank[name] for rank in ranks), key=lambda figures: figures.sent)
        more = f", {sends.sent - sends.formula:+d}" if sends.formula else ""
        yield [
            name, f"{statistics.median(walls):.1f}", ratio(alone, walls, 2),
            f"{statistics.median(busy):.1f}, {cpu:.2f}", f"{statistics.median(waits):.1%}",
            f"{sends.sent}{more}", f"{most(ranks, name):.1f}",
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
        times = [statistics.median(busier(results[size], name, "wall")) for size in sizes]
        peaks = [most(results[size], name) for size in sizes]
        yield [name, *map("{}; {}".format, with_ratios(times), with_ratios(peaks))]


def with_ratios(figures: list[float]) -> list[str]:
    """Return figures with their ratio to the previous one."""
    ratios = [f", x {after / before:.2f}" for before, after in itertools.pairwise(figures)]
    return [f"{figure:.1f}{r}" for figure, r in zip(figures, ["", *ratios], strict=True)]
