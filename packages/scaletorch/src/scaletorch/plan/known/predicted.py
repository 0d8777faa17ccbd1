"""What the planner says of published runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product

from ..memory import memory
from ..timing import time
from .closed import transformer
from .machines import GIB, MACHINES, STATES, Constants
from .rows import Row


def predicted_seconds(row: Row, constants: Constants | None = None) -> float:
    """Return the seconds of a step, with other constants than the machine's if they are given."""
    described = transformer(row.sizes, [row.layout.cut], row.program)
    cluster = MACHINES[row.machine].cluster(row.layout.grid.world_size, constants)
    return time(described, row.layout, cluster).step


def predicted_gib(row: Row) -> float:
    """Return GiB of the fullest rank.

    A stage keeps its whole output, even if each rank sends its share alone. The two holders of a
    tied weight are counted as those of two weights, as ZeRO has them.
    """
    sizes = replace(row.sizes, tied=row.layout.grid.pp == 1)
    described = transformer(sizes, [row.layout.cut], replace(row.program, scattered=False))
    held = max(each.total for each in memory(described, row.layout, STATES[row.states]))
    return (held + MACHINES[row.machine].constants.reserved) / GIB


def fitted(machine: str, given: Iterable[Row], *, step: float = 0.01) -> Constants:
    """Return a machine's constants of its rows that are marked so.

    The shares are those of a grid from 0.3 to 1 that leave the least mean square of the logarithm
    of predicted to measured seconds; what is reserved is the mean of what measured memory has
    more. A machine with fewer than three rows has `products` fitted alone.
    """
    rows = [row for row in given if row.machine == machine and row.fit]
    own = MACHINES[machine].constants
    timed, weighed = [r for r in rows if r.seconds], [r for r in rows if r.gib]
    grid = [round(0.3 + step * at, 4) for at in range(round(0.7 / step) + 1)]
    movings = grid if len(timed) > 2 else [own.moving]

    def off(pair: tuple[float, float]) -> float:
        constants = Constants(*pair)
        return sum(math.log(predicted_seconds(r, constants) / r.seconds) ** 2 for r in timed)

    products, moving = _least(off, grid, movings)
    less = MACHINES[machine].constants.reserved / GIB
    missing = [row.gib - predicted_gib(row) + less for row in weighed]
    reserved = sum(missing) / len(missing) if missing else 0.0
    return Constants(products, moving, round(reserved * 10) * GIB // 10)


def _least(
    off: Callable[[tuple[float, float]], float], first: Sequence[float], second: Sequence[float]
) -> tuple[float, float]:
    """Return the pair of the grid with the least error: coarse, then what is around it."""
    coarse = min(product(first[::5], second[::5]), key=off)
    around = [
        [each for each in line if abs(each - at) < (first[1] - first[0]) * 5]
        for line, at in zip((first, second), coarse, strict=True)
    ]
    return min(product(*around), key=off)
