"""Cost of the guard: host time that it adds to a call, and calls with it on and off.

python -m benchmarks.guard
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from operator import attrgetter

import torch
import torch.distributed as c10d

import scaletorch.dist as dist
from scaletorch import guard
from scaletorch.dist.wire import backend

from ..harness.tables import table
from ..harness.turns import Spent, in_turns, timed

SIZES = (2, 256, 262_144, 4_194_304)  # float32
ROUNDS = 12


def host_time(call: Callable[[], object], count: int = 1000) -> float:
    """Return the microseconds of one call, the best of several rounds."""
    best = float("inf")
    for _ in range(7):
        begun = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - begun) / count)
    return best * 1e6


def added() -> dict[str, float]:
    """Measure the guard's own work in a call, without communication."""
    data, group = torch.ones(4, 4), c10d.group.WORLD
    with guard.watch():
        recorder = backend.guard
        if recorder is None or group is None:
            raise SystemExit("the guard has not started")
        note = recorder.record(group, "all_reduce", (data, "sum"))
        others = {
            "note a collective": lambda: recorder.record(group, "all_reduce", (data, "sum")),
            "note its wait": lambda: recorder.run((note,), _nothing),
            "end of a step": guard.step,
        }
        # Both ranks do the same, so that the guard finds no fault.
        return {name: host_time(call) for name, call in others.items()}


def _nothing() -> None:
    pass


def all_reduces(numel: int) -> list[float]:
    """Return microseconds of an all-reduce without and with the guard, medians in turns.

    First wall time, then CPU time of this thread, which other programs affect less.
    """
    data = torch.zeros(numel)
    count = 400 if numel < 1000 else 20 if numel < 1_000_000 else 3
    times: dict[bool, list[Spent]] = {False: [], True: []}

    def calls() -> None:
        for _ in range(count):
            dist.all_reduce(data)

    for on in in_turns(times, ROUNDS):
        if on:
            guard.start()
        dist.all_reduce(data)
        times[on].append(timed(calls).over(count))
        guard.stop()
    return [
        1e6 * statistics.median(map(attrgetter(clock), times[on]))
        for clock in ("wall", "main")
        for on in (False, True)
    ]


def measure() -> tuple[dict[str, float], list[list[float]]]:
    """Measure everything on this rank."""
    return added(), [[numel, *all_reduces(numel)] for numel in SIZES]


def main() -> None:
    """Print the tables."""
    parts, rows = dist.launch(measure, 2)[0]
    added = [(name, f"{taken:.2f}") for name, taken in parts.items()]
    print(table(["what the guard adds", "µs"], added))
    calls = [[f"{4 * numel:.0f} B", *(f"{each:.0f}" for each in taken)] for numel, *taken in rows]
    columns = ["all_reduce, float32, 2 ranks", "off µs", "on µs", "host, off", "host, on"]
    print(f"\n{table(columns, calls)}")


if __name__ == "__main__":
    main()
