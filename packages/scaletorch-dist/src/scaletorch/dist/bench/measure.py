"""Measuring one call at one size: rounds of many calls, of which the slowest rank counts."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as c10d

from ..collectives.reduce import all_reduce
from ..devices import get_comm_device, synchronize
from ..errors import InvalidArgumentError
from .cases import CASES, MESSAGES_THERE_AND_BACK, Place, Run

ROUNDS = 5
MOST_CALLS = 500  # in one round


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        call: Its name in `CASES`.
        size: Bytes, as `CASES` counts them.
        seconds: Of one call; the median of the rounds.
        least: The quickest round's.
        algorithm_bandwidth: Size / seconds, bytes per second.
        bus_bandwidth: What the busiest link carried, bytes per second.
        calls: How often it was called in all.
    """

    call: str
    size: int
    seconds: float
    least: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    calls: int


def sizes_between(least: int, most: int, factor: int) -> list[int]:
    """Return sizes that grow by a factor, the largest one last.

    Raises:
        InvalidArgumentError: There are none, or the factor does not grow them.
    """
    if not 1 <= least <= most or factor < 2:
        message = f"sizes grow from 1 byte or more, by 2 or more: got {least} to {most} by {factor}"
        raise InvalidArgumentError(message)
    sizes = []
    while least < most:
        sizes.append(least)
        least *= factor
    return [*sizes, most]


def measure(name: str, size: int, place: Place, seconds: float) -> Row:
    """Measure a call at one size; every rank of the world makes the same call.

    Args:
        name: Of the call, in `CASES`.
        size: Bytes; rounded up to what the call can take.
        place: Where.
        seconds: About how long to measure.

    Returns:
        The row, the same one on every rank of the world.
    """
    case, ranks = CASES[name], len(place.ranks)
    size = 0 if case.largest == 0 else case.size(size, ranks)
    run = case.make(place, size)
    calls = _calls(run, place, seconds / ROUNDS)
    rounds = [_slowest(_time(run, calls, place), place) for _ in range(ROUNDS)]
    share = 2 if name in MESSAGES_THERE_AND_BACK else 1
    median, least = statistics.median(rounds) / share, min(rounds) / share
    bandwidth = size / median
    return Row(name, size, median, least, bandwidth, bandwidth * case.factor(ranks), calls * ROUNDS)


def _calls(run: Run, place: Place, seconds: float) -> int:
    """Return how many calls take about so long, agreed by all ranks; it warms up too."""
    _time(run, 2, place)
    once = _slowest(_time(run, 3, place), place)
    return max(1, min(MOST_CALLS, int(seconds / once)))


def _time(run: Run, calls: int, place: Place) -> float:
    """Return the seconds of one call, of so many in a row that all ranks begin together."""
    synchronize(place.device)
    c10d.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(place.device)
    return (time.perf_counter() - begin) / calls


def _slowest(seconds: float, place: Place) -> float:
    """Return the slowest rank's time, over the world: groups along an axis work side by side."""
    data = torch.tensor(seconds, dtype=torch.float64, device=get_comm_device())
    all_reduce(data, "max")
    return float(data)
