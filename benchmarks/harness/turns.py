"""Several ways to do one thing take turns, on all ranks in the same shuffled order."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

Run = Callable[[], object]
Key = TypeVar("Key")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Spent:
    """Seconds of one call: of the clock, of all threads, of the thread that calls."""

    wall: float
    cpu: float
    main: float

    def over(self, calls: int) -> Spent:
        """Return what one of so many calls in a row takes."""
        return Spent(self.wall / calls, self.cpu / calls, self.main / calls)


def in_turns(names: Iterable[Key], repeats: int) -> Iterator[Key]:
    """Yield every name once a repeat, shuffled, in the same order on all ranks."""
    order, chance = list(names), random.Random(0)
    for _ in range(repeats):
        chance.shuffle(order)
        yield from order


def timed(run: Run) -> Spent:
    """Return what a call takes, from when all ranks are there."""
    dist.barrier()
    wall, cpu, main = time.perf_counter(), time.process_time(), time.thread_time()
    run()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - main)


def seconds(run: Run) -> float:
    """Return the seconds of a call, from when all ranks are there."""
    return timed(run).wall


def repeated(
    gauge: Callable[[Run], Found], runs: Mapping[Key, Run], repeats: int
) -> dict[Key, list[Found]]:
    """Return what was measured of every way, which take turns."""
    found: dict[Key, list[Found]] = {name: [] for name in runs}
    for name in in_turns(runs, repeats):
        found[name].append(gauge(runs[name]))
    return found


def of_slowest_rank(figures: Sequence[float]) -> list[float]:
    """Return the largest of all ranks' figures, each of its own repeat; every rank calls it."""
    found = torch.tensor(figures, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return list(found.tolist())


@contextmanager
def collected() -> Iterator[None]:
    """Look through garbage once; what lives on need not be looked at again before every step."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
