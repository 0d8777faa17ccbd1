"""Layouts that fit a world, for people: the nearest to a wrong one, and ranks in short form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ...dist.errors import InvalidArgumentError
from .grid import Grid

# The cost of changing an axis to the program: more data parallelism changes nothing but speed,
# another tensor parallel size reshapes every weight.
_COST = {"dp": 1, "pp": 2, "cp": 2, "tp": 3}


def legal_layouts(world_size: int) -> Iterator[Grid]:
    """Return every layout of `world_size` ranks.

    Raises:
        InvalidArgumentError: Less than one rank.
    """
    _require_whole("world_size", world_size, 1)
    return _layouts(world_size)


def _layouts(world_size: int) -> Iterator[Grid]:
    for tp in _divisors(world_size):
        for cp in _divisors(world_size // tp):
            for pp in _divisors(world_size // tp // cp):
                yield Grid(tp=tp, cp=cp, pp=pp, dp=world_size // tp // cp // pp)


def nearest_layouts(asked: Grid, world_size: int, count: int = 3) -> list[Grid]:
    """Return layouts of `world_size` ranks that change `asked` least, best first.

    Fewest axes changed come first, then the smallest factors, with dp the cheapest to change
    and tp the dearest.

    Raises:
        InvalidArgumentError: `asked` is no layout, less than one rank, or a negative count.
    """
    if not isinstance(asked, Grid):
        raise InvalidArgumentError(f"asked must be a Grid, got {type(asked).__name__}")
    _require_whole("count", count, 0)
    return sorted(legal_layouts(world_size), key=lambda grid: _distance(asked, grid))[:count]


def wrong_product(asked: Grid, world_size: int) -> str:
    """Return the message for a layout whose product is not the number of ranks."""
    near = ", ".join(
        f"(tp={grid.tp}, cp={grid.cp}, pp={grid.pp}, dp={grid.dp})"
        for grid in nearest_layouts(asked, world_size)
    )
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return (
        f"the layout needs tp * cp * pp * dp = {asked.tp} * {asked.cp} * {asked.pp} * {asked.dp}"
        f" = {asked.world_size} ranks, but the world has {ranks}; nearest layouts that fit: {near}"
    )


def short_ranks(ranks: Sequence[int]) -> str:
    """Write ascending ranks briefly: `0-7`, `0, 8, 16, ..., 504` or `0-7, 32-39`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    parts = ["-".join(map(str, run)) for run in runs]
    if len(parts) > 5:
        parts = [*parts[:3], "...", parts[-1]]
    return ", ".join(parts)


def _require_whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgumentError(f"{name} must be a whole number, at least {least}: {value!r}")


def _distance(asked: Grid, grid: Grid) -> tuple[int, float, tuple[int, ...]]:
    factors = {axis: getattr(grid, axis) / getattr(asked, axis) for axis in _COST}
    changed = sum(factor != 1 for factor in factors.values())
    effort = sum(_COST[axis] * abs(math.log2(factor)) for axis, factor in factors.items())
    return changed, effort, (-grid.tp, -grid.cp, -grid.pp)  # the last one only settles ties


def _divisors(number: int) -> list[int]:
    small = [low for low in range(1, math.isqrt(number) + 1) if number % low == 0]
    return small + [number // low for low in reversed(small) if low * low != number]
