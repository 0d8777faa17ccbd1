"""Interleaved rounds of several ways to do one thing, on all ranks; the slower rank counts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from dist_ways import Ways, barriers, models, objects, tensors
from torch.testing._internal.distributed.fake_pg import FakeStore

SIZES = {"8 B": 8, "1 KiB": 1 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20}
SECONDS = 0.02  # of one way in one round, at most
Times = dict[str, list[float]]  # way → seconds of one call, in each round
Rows = dict[tuple[str, str], Times]  # part, call → times


def interleaved(ways: Ways, rounds: int) -> Times:
    """Return the seconds of one call of each way in each round, in which all take their turn."""
    calls = _calls(ways)
    order, chance = list(ways), random.Random(0)
    times = torch.zeros(len(ways), rounds, dtype=torch.float64)
    for at in range(rounds):
        chance.shuffle(order)
        for name in order:
            times[list(ways).index(name), at] = _time(ways[name], calls)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return dict(zip(ways, times.tolist(), strict=True))


def _calls(ways: Ways) -> int:
    """Return how many calls make a round, the same on all ranks; it warms up too."""
    longest = torch.tensor([max(_time(run, 2) for run in ways.values()) for _ in range(2)][1:])
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return max(1, min(50, int(SECONDS / longest.item())))


def _time(
    run: Callable[[], object], calls: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    dist.barrier()
    begin = clock()
    for _ in range(calls):
        run()
    return (clock() - begin) / calls


def measure(parts: list[str], rounds: int, only: str) -> Rows:
    """Measure on this rank.

    Args:
        parts: of ``SIZES``, or "models", "objects".
        rounds: how often each way takes its turn; large things take fewer.
        only: what a call's name must contain.
    """
    rows: Rows = {}
    for part in parts:
        for name, ways in _calls_of(part):
            if only in name:
                few = part == "64 MiB" or "20 M" in name
                rows[part, name] = interleaved(ways, max(3, rounds // 3) if few else rounds)
    return rows


def _calls_of(part: str) -> Iterator[tuple[str, Ways]]:
    if part in SIZES:
        yield from tensors(SIZES[part])
    else:
        yield from models() if part == "models" else objects()
    if part == "8 B":
        yield from barriers()


PURE = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "exchange", "barrier")


def python_path(rounds: int) -> Rows:
    """Measure the processor's time of small calls where nothing is sent: torch's "fake" backend."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        found = {name: ways for name, ways in [*tensors(8), *barriers()] if name in PURE}
        rows: Rows = {("no network", name): {way: [] for way in found[name]} for name in found}
        for _ in range(rounds):
            for name, ways in found.items():
                for way, run in ways.items():
                    rows["no network", name][way].append(_time(run, 200, time.process_time))
        return rows
    finally:
        dist.destroy_process_group()
