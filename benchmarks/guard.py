"""What the guard costs: host time of what it adds to a call, and calls with it on and off.

python benchmarks/guard.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as c10d

import scaletorch.dist as dist
from scaletorch.dist import guard
from scaletorch.dist.collectives import hooks

SIZES = (2, 256, 262_144, 4_194_304)  # float32
ROUNDS = 12


def host_time(call: Callable[[], object], count: int = 1000) -> float:
    """Return the microseconds of one call, best of several rounds."""
    best = float("inf")
    for _ in range(7):
        begun = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - begun) / count)
    return best * 1e6


def added() -> dict[str, float]:
    """Measure what the guard itself does in a call, without any communication."""
    data, group = torch.ones(4, 4), c10d.group.WORLD
    with guard.watch():
        recorder = hooks.guard
        assert recorder is not None
        assert group is not None
        others = {
            "note a collective": lambda: recorder.record(group, "all_reduce", (data, "sum")),
            "note its wait": lambda: recorder.run(_nothing),
            "end of a step": guard.step,
        }
        # Alike on both ranks, so that nothing is at fault.
        return {name: host_time(call) for name, call in others.items()}


def _nothing() -> None:
    pass


def all_reduces(numel: int) -> list[float]:
    """Return microseconds of an all-reduce without and with the guard, medians in turns.

    Time that passes, and time of this thread on a core, which other programs disturb less.
    """
    data = torch.zeros(numel)
    count = 400 if numel < 1000 else 20 if numel < 1_000_000 else 3
    times: dict[tuple[bool, Callable[[], float]], list[float]] = {
        (on, clock): [] for clock in (time.perf_counter, time.thread_time) for on in (False, True)
    }
    for turn in range(2 * ROUNDS):
        on = turn % 2 == 1
        if on:
            guard.start()
        dist.all_reduce(data)
        begun = {clock: clock() for _, clock in times}
        for _ in range(count):
            dist.all_reduce(data)
        for clock in begun:
            times[on, clock].append((clock() - begun[clock]) / count * 1e6)
        guard.stop()
    return [statistics.median(taken) for taken in times.values()]


def measure() -> tuple[dict[str, float], list[list[float]]]:
    """Measure all on this rank."""
    return added(), [[numel, *all_reduces(numel)] for numel in SIZES]


def main() -> None:
    """Print the tables."""
    parts, rows = dist.launch(measure, 2)[0]
    print("| what the guard adds | µs |\n| --- | --- |")
    for name, taken in parts.items():
        print(f"| {name} | {taken:.2f} |")
    print("\n| all_reduce, float32, 2 ranks | off µs | on µs | host, off | host, on |")
    print("| --- | --- | --- | --- | --- |")
    for numel, *taken in rows:
        print(f"| {4 * numel:.0f} B | {' | '.join(f'{value:.0f}' for value in taken)} |")


if __name__ == "__main__":
    main()
