"""Turns: several ways to do one thing run in the same shuffled order on all ranks."""

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
    """Seconds of one call: wall time, CPU time of all threads, CPU time of the calling thread."""

    wall: float
    cpu: float
    main: float

    def over(self, calls: int) -> Spent:
        """Return the time of one of `calls` consecutive calls."""
        return Spent(self.wall / calls, self.cpu / calls, self.main / calls)


def in_turns(names: Iterable[Key], repeats: int) -> Iterator[Key]:
    """Yield every name once a repeat, in a shuffled order that is the same on all ranks."""
    order, chance = list(names), random.Random(0)
    for _ in range(repeats):
        chance.shuffle(order)
        yield from order


def timed(run: Run) -> Spent:
    """Return the time of a call that starts when all ranks are ready."""
    dist.barrier()
    wall, cpu, main = time.perf_counter(), time.process_time(), time.thread_time()
    run()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - main)


def seconds(run: Run) -> float:
    """Return the wall seconds of a call that starts when all ranks are ready."""
    return timed(run).wall


def repeated(
    gauge: Callable[[Run], Found], runs: Mapping[Key, Run], repeats: int
) -> dict[Key, list[Found]]:
    """Return the measurements of every way; the ways take turns."""
    found: dict[Key, list[Found]] = {name: [] for name in runs}
    for name in in_turns(runs, repeats):
        found[name].append(gauge(runs[name]))
    return found


def of_slowest_rank(figures: Sequence[float]) -> list[float]:
    """Return each repeat's largest figure over all ranks; every rank calls it."""
    found = torch.tensor(figures, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return list(found.tolist())


@contextmanager
def collected() -> Iterator[None]:
    """Collect garbage once and freeze what is left, so that steps do not scan it again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
