"""Tables of what attention over several ranks costs, beside one process."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import TypeAlias

ALONE = "one process"


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
        times: wall and CPU seconds.
        exposed: share of the time that is communication.
    """

    sent: int
    formula: int
    peak: int
    times: list[tuple[float, float]]
    exposed: list[float]


Ranks: TypeAlias = list[dict[str, Figures]]  # of every rank, by way


def busier(ranks: Ranks, name: str, clock: int) -> list[float]:
    """Return the milliseconds of each repeat, of the rank that took more; clock 1 is CPU time."""
    repeats = zip(*(rank[name].times for rank in ranks), strict=True)
    return [1e3 * max(times[clock] for times in repeat) for repeat in repeats]


def most(ranks: Ranks, name: str) -> float:
    """Return the MiB of the rank that took more."""
    return max(rank[name].peak for rank in ranks) / 2**20


def show(size: Size, ranks: Ranks) -> None:
    """Print one size."""
    print(f"\n{size.length} positions, {size.what}\n")
    print(
        "| way | ms | speed-up (quartiles) | CPU ms, speed-up | waiting | bytes, - formula | MiB |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    alone, busy_alone = ([t[i] for t in ranks[0][ALONE].times] for i in (0, 1))
    for name in ranks[0]:
        walls, busy = (busier(ranks, name, clock) for clock in (0, 1))
        ratios = [1e3 * one / wall for one, wall in zip(alone, walls, strict=True)]
        low, middle, high = quartiles(ratios)
        cpu = 1e3 * statistics.median(busy_alone) / statistics.median(busy)
        exposed = (rank[name].exposed for rank in ranks)
        waits = statistics.median(map(min, zip(*exposed, strict=True)))
        sends = max((rank[name] for rank in ranks), key=lambda figures: figures.sent)
        more = f", {sends.sent - sends.formula:+d}" if sends.formula else ""
        print(
            f"| {name} | {statistics.median(walls):.1f} | {middle:.2f} ({low:.2f}-{high:.2f}) | "
            f"{statistics.median(busy):.1f}, {cpu:.2f} | {waits:.1%} | {sends.sent}{more} | "
            f"{most(ranks, name):.1f} |",
            flush=True,
        )


def quartiles(figures: list[float]) -> list[float]:
    """Return the three quartiles; of one figure it thrice."""
    return statistics.quantiles(figures, n=4, method="inclusive") if figures[1:] else figures * 3


def show_growth(results: dict[Size, Ranks]) -> None:
    """Print what each length takes, and its ratio to the length before."""
    for what in dict.fromkeys(size.what for size in results):
        sizes = sorted((size for size in results if size.what == what), key=lambda s: s.length)
        if len(sizes) == 1:
            continue
        print(f"\nhow it grows: ms; MiB, {what}\n")
        print("| way |", " | ".join(f"{size.length} positions" for size in sizes), "|")
        print("| --- |", " | ".join("---" for _ in sizes), "|")
        for name in results[sizes[0]][0]:
            times = [statistics.median(busier(results[size], name, 0)) for size in sizes]
            peaks = [most(results[size], name) for size in sizes]
            cells = map("{}; {}".format, with_ratios(times), with_ratios(peaks))
            print(f"| {name} |", " | ".join(cells), "|")


def with_ratios(figures: list[float]) -> list[str]:
    """Return figures with their ratio to the one before."""
    ratios = [f", x {after / before:.2f}" for before, after in itertools.pairwise(figures)]
    return [f"{figure:.1f}{r}" for figure, r in zip(figures, ["", *ratios], strict=True)]
