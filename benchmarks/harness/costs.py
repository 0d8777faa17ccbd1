"""The costs of each way over two ranks: time, bytes sent, time in communication, peak memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

import torch
import torch.distributed as dist

from .gauges import exposed, peak, sent
from .tables import MIB, largest
from .turns import Run, Spent, of_slowest_rank, repeated, seconds, timed

RANKS = 2
LEAST, MOST = 9, 200  # repeats
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BOUNDS = {"float32": 1e-4, "bfloat16": 1e-1}
ALONE = "one process"


@dataclass(frozen=True)
class Figures:
    """Measurements of one way; a list has one entry for each repeat.

    Attributes:
        sent: Bytes sent.
        peak: Peak bytes.
        spent: Time of forward and backward.
        exposed: Seconds in communication.
    """

    sent: int
    peak: int
    spent: list[Spent]
    exposed: list[float]


Ranks = list[dict[str, Figures]]  # of every rank, by way


def alone(run: Run) -> dict[str, Run]:
    """Return the way of one process, for which the other ranks wait."""
    return {ALONE: run if dist.get_rank() == 0 else lambda: None}


def measured(runs: Mapping[str, Run], budget: float) -> dict[str, Figures]:
    """Measure every way on this rank, for about `budget` seconds each."""
    (spent,) = of_slowest_rank([sum(map(seconds, runs.values()))])
    repeats = min(MOST, max(LEAST, int(budget * len(runs) / spent)))
    return figures(runs, repeats)


def figures(runs: Mapping[str, Run], repeats: int) -> dict[str, Figures]:
    """Measure every way on this rank, in turns."""
    times = repeated(timed, runs, repeats)
    waits = repeated(exposed, runs, max(1, repeats // 3))
    # Gloo's threads may free sent tensors late: the smaller of two peaks is the way's own.
    peaks = {name: min(peak(run) for _ in range(2)) for name, run in runs.items()}
    return {
        name: Figures(sent(run), peaks[name], times[name], waits[name])
        for name, run in runs.items()
    }


def slowest(ranks: Ranks, clock: str = "wall") -> dict[str, list[float]]:
    """Return each way's seconds by repeat, of the rank with more "wall" or "cpu" time."""
    return {
        name: largest([rank[name].spent for rank in ranks], attrgetter(clock)) for name in ranks[0]
    }


def waits(ranks: Ranks, name: str) -> float:
    """Return the median seconds in communication, of the rank that does not wait for its peer."""
    each = zip(*(rank[name].exposed for rank in ranks), strict=True)
    shortest: list[float] = [min(repeat) for repeat in each]
    return statistics.median(shortest)


def sent_and_held(ranks: Ranks, name: str, formula: int) -> list[str]:
    """Return the cells of bytes sent, that over `formula`, peak MiB, and exposed ms."""
    bytes_sent = max(rank[name].sent for rank in ranks)
    peak_mib = max(rank[name].peak for rank in ranks) / MIB
    exposed_ms = 1e3 * waits(ranks, name)
    return [
        str(bytes_sent), f"{bytes_sent / formula:.2f}", f"{peak_mib:.2f}", f"{exposed_ms:.2f}",
    ]  # fmt: skip
