"""Measurements of every call by every way on one rank; every rank runs the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ..harness.turns import Run, in_turns, of_slowest_rank, repeated, seconds, timed
from .ways import Ways, barriers, models, objects, tensors

SIZES = {"8 B": 8, "1 KiB": 1 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20}
SECONDS = 0.02  # longest time of one way in one round
CALLS = 200  # calls of one way in one round, if nothing is sent
Times = dict[str, list[float]]  # way → seconds of one call, in each round
Rows = dict[tuple[str, str], Times]  # part, call → times


def interleaved(ways: Ways, rounds: int) -> Times:
    """Return the seconds of one call of each way in each round; the ways take turns."""
    calls = _calls(ways)
    times = repeated(partial(_time, calls=calls), ways, rounds)
    return {name: of_slowest_rank(found) for name, found in times.items()}


def _calls(ways: Ways) -> int:
    """Return the number of calls in a round, the same on all ranks; this also warms up."""
    _, spent = (max(_time(run, 2) for run in ways.values()) for _ in range(2))
    (longest,) = of_slowest_rank([spent])
    return max(1, min(50, int(SECONDS / longest)))


def _time(run: Run, calls: int) -> float:
    return seconds(partial(_again, run, calls)) / calls


def _again(run: Run, calls: int) -> None:
    for _ in range(calls):
        run()


def measure(parts: list[str], rounds: int, only: str) -> Rows:
    """Measure on this rank.

    Args:
        parts: Keys of `SIZES`, "models" or "objects".
        rounds: Number of turns of each way; large calls take a third.
        only: Text that a call's name must contain.
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
    """Measure the CPU time of small calls without a network, on torch's "fake" backend."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        found = {name: ways for name, ways in [*tensors(8), *barriers()] if name in PURE}
        rows: Rows = {("no network", name): {way: [] for way in found[name]} for name in found}
        runs = {(name, way): run for name, ways in found.items() for way, run in ways.items()}
        for key in in_turns(runs, rounds):
            spent = timed(partial(_again, runs[key], CALLS))
            rows["no network", key[0]][key[1]].append(spent.cpu / CALLS)
        return rows
    finally:
        dist.destroy_process_group()
