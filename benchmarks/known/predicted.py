"""Predictions of the planner for published runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from scaletorch.plan.memory import memory
from scaletorch.plan.timing import time

from .closed import transformer
from .machines import GIB, MACHINES, STATES, Constants
from .rows import Row


def predicted_seconds(row: Row, constants: Constants | None = None) -> float:
    """Return the seconds of a step; `constants` replaces those of the machine."""
    described = transformer(row.sizes, [row.layout.cut], row.program)
    cluster = MACHINES[row.machine].cluster(row.layout.grid.world_size, constants)
    return time(described, row.layout, cluster).step


def predicted_gib(row: Row) -> float:
    """Return the GiB of the fullest rank.

    A stage keeps its full output, even if each rank sends only its shard. The two copies of a tied
    weight count as two weights, as in ZeRO.
    """
    sizes = replace(row.sizes, tied=row.layout.grid.pp == 1)
    described = transformer(sizes, [row.layout.cut], replace(row.program, scattered=False))
    held = max(each.total for each in memory(described, row.layout, STATES[row.states]))
    return (held + MACHINES[row.machine].constants.reserved) / GIB


def fitted(machine: str, given: Iterable[Row]) -> Constants:
    """Return a machine's constants, fitted on its rows marked `fit`.

    `products` and `overhead` minimize the mean square of the logarithm of predicted over measured
    seconds, on a grid of hundredths and microseconds. `reserved` is the mean of measured minus
    predicted memory, in tenths of a GiB. A machine with fewer than three rows keeps its `overhead`.
    """
    rows = [row for row in given if row.machine == machine and row.fit]
    timed, weighed = [r for r in rows if r.seconds], [r for r in rows if r.gib]

    def off(pair: tuple[int, int]) -> float:
        constants = Constants(pair[0] / 100, pair[1] * 1e-6)
        return sum(math.log(predicted_seconds(r, constants) / r.seconds) ** 2 for r in timed)

    own = round(MACHINES[machine].constants.overhead * 1e6)
    many = len(timed) > 2
    coarse = product(range(30, 101, 5), range(0, 401, 20) if many else [own])
    at, since = min(coarse, key=off)
    around = range(max(0, since - 19), since + 20) if many else [own]
    products, overhead = min(product(range(at - 4, min(at + 5, 101)), around), key=off)
    less = MACHINES[machine].constants.reserved / GIB
    missing = [row.gib - predicted_gib(row) + less for row in weighed]
    reserved = sum(missing) / len(missing) if missing else 0.0
    return Constants(products / 100, overhead * 1e-6, round(reserved * 10) * GIB // 10)
