"""Tables of what attention over several ranks costs, beside one process."""

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
    """What is computed by every way: forward and backward, or forward alone."""

    length: int
    dtype: str
    backward: bool

    @property
    def what(self) -> str:
        """The size, but for its length, in words."""
        return f"{self.dtype}, {'forward and backward' if self.backward else 'forward'}"


@dataclass(frozen=True)
class Figures:
    """What was measured of one way; a list has one entry for each repeat.

    Attributes:
        sent: bytes.
        formula: the bytes that should be sent.
        peak: bytes.
        times: of each repeat.
        exposed: share of the time that is communication.
    """

    sent: int
    formula: int
    peak: int
    times: list[Spent]
    exposed: list[float]


Ranks: TypeAlias = list[dict[str, Figures]]  # of every rank, by way


def busier(ranks: Ranks, name: str, clock: str) -> list[float]:
    """Return the milliseconds of each repeat, of the rank that took more of "wall" or "cpu"."""
    of_ranks = [rank[name].times for rank in ranks]
    return [1e3 * each for each in largest(of_ranks, attrgetter(clock))]


def most(ranks: Ranks, name: str) -> float:
    """Return the MiB of the rank that took more."""
    return max(rank[name].peak for rank in ranks) / MIB


def show(size: Size, ranks: Ranks) -> None:
    """Print one size."""
    print(f"\n{size.length} positions, {size.what}\n\n{table(COLUMNS, rows(ranks))}", flush=True)


def rows(ranks: Ranks) -> Iterator[Sequence[str]]:
    """Write a way's row."""
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
    """Print what each length takes, and its ratio to the length before."""
    for what in dict.fromkeys(size.what for size in results):
        sizes = sorted((size for size in results if size.what == what), key=lambda s: s.length)
        if len(sizes) == 1:
            continue
        columns = ["way", *(f"{size.length} positions" for size in sizes)]
        print(f"\nhow it grows: ms; MiB, {what}\n\n{table(columns, grown(results, sizes))}")


def grown(results: dict[Size, Ranks], sizes: list[Size]) -> Iterator[Sequence[str]]:
    """Write a way's row."""
    for name in results[sizes[0]][0]:
        times = [statistics.median(busier(results[size], name, "wall")) for size in sizes]
        peaks = [most(results[size], name) for size in sizes]
        yield [name, *map("{}; {}".format, with_ratios(times), with_ratios(peaks))]


def with_ratios(figures: list[float]) -> list[str]:
    """Return figures with their ratio to the one before."""
    ratios = [f", x {after / before:.2f}" for before, after in itertools.pairwise(figures)]
    return [f"{figure:.1f}{r}" for figure, r in zip(figures, ["", *ratios], strict=True)]
