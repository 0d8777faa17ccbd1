"""Layouts: their short names, all that fit a world size, and the nearest to one that does not."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from ...dist.errors import InvalidArgumentError
from .grid import Grid, default_etp, divisors, nearest_divisors

# Cost to the program of changing an axis: dp changes only speed, tp reshapes every weight.
_COST = {"dp": 1, "pp": 2, "cp": 2, "tp": 3, "ep": 2}
_AXIS = r"(dp|pp|cp|tp|ep|etp)(\d+)"


def layout_name(grid: Grid) -> str:
    """Return a layout as `dp x pp x cp x tp`, such as `2x1x2x2`, `2x1x2x2-ep4` or `-ep2-etp2`."""
    name = f"{grid.dp}x{grid.pp}x{grid.cp}x{grid.tp}" + f"-ep{grid.ep}" * (grid.ep > 1)
    usual = default_etp(grid.ep, grid.tp)
    return name if grid.etp == usual else f"{name}-etp{grid.etp}"


def parse_layout(text: str) -> Grid:
    """Parse `2x1x2x2`, `2x1x2x2-ep4` or `2x1x2x2-ep2-etp2`, or axes by name: `dp2-tp2`, `dp4-ep2`.

    Raises:
        InvalidArgumentError: The text has neither form, a size is 0, or `ep * etp` does not
            divide the ranks of a stage.
    """
    named = re.sub(r"^(\d+)x(\d+)x(\d+)x(\d+)(?=-|$)", r"dp\1-pp\2-cp\3-tp\4", text, flags=re.ASCII)
    words = [re.fullmatch(_AXIS, word, re.ASCII) for word in named.split("-")]
    sizes = {word[1]: int(word[2]) for word in words if word is not None}
    if len(sizes) < len(words) or 0 in sizes.values():
        raise InvalidArgumentError(
            f"layout {text!r} is not DPxPPxCPxTP, four positive numbers such as 2x1x2x2, or "
            "2x1x2x2-ep4 with an expert parallel size, or 2x1x2x2-ep2-etp2 with both; nor the same "
            "by name, such as dp2-tp2"
        )
    return Grid(**sizes)


def legal_layouts(world_size: int) -> Iterator[Grid]:
    """Return every plain layout (`ep` 1) of `world_size` ranks.

    Raises:
        InvalidArgumentError: `world_size` is less than 1.
    """
    if type(world_size) is not int or world_size < 1:
        raise InvalidArgumentError(f"world_size must be a positive int, got {world_size!r}")
    return (
        Grid(tp=tp, cp=cp, pp=pp, dp=world_size // tp // cp // pp)
        for tp in divisors(world_size)
        for cp in divisors(world_size // tp)
        for pp in divisors(world_size // tp // cp)
    )


def nearest(asked: Grid, world_size: int) -> list[Grid]:
    """Return the three layouts of `world_size` ranks that change `asked` least, best first."""
    layouts = (_with_experts(grid, asked) for grid in legal_layouts(world_size))
    return sorted(layouts, key=lambda grid: _distance(asked, grid))[:3]


def _with_experts(grid: Grid, asked: Grid) -> Grid:
    """Return the layout with the legal ep and etp sizes nearest to those of `asked`."""
    if asked.is_plain:
        return grid
    etp = 1 if asked.etp == 1 else grid.tp
    ep = nearest_divisors(asked.ep, grid.size("tp_cp_dp") // etp)[0]
    if ep == 1 != asked.ep:
        return grid  # experts are not divided: a plain grid is enough
    return Grid(tp=grid.tp, cp=grid.cp, pp=grid.pp, dp=grid.dp, ep=ep, etp=etp)


def wrong_product(asked: Grid, world_size: int) -> str:
    """Return the error message for a layout whose size is not the world size."""
    near = ", ".join(map(_sizes, nearest(asked, world_size)))
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return (
        f"the layout needs tp * cp * pp * dp = {asked.tp} * {asked.cp} * {asked.pp} * {asked.dp}"
        f" = {asked.world_size} ranks, but the world has {ranks}; nearest layouts that fit: {near}"
    )


def _sizes(grid: Grid) -> str:
    experts = "" if grid.is_plain else f", ep={grid.ep}" + f", etp={grid.etp}" * (grid.etp > 1)
    return f"(tp={grid.tp}, cp={grid.cp}, pp={grid.pp}, dp={grid.dp}{experts})"


def place_text(grid: Grid, rank: int) -> str:
    """Return a rank's coordinates as text, with the expert axes if the grid is not plain."""
    place = str(grid.coordinates(rank))
    return place if grid.is_plain else f"{place} {grid.expert_coordinates(rank)}"


def _distance(asked: Grid, grid: Grid) -> tuple[int, float, tuple[int, ...]]:
    factors = {axis: getattr(grid, axis) / getattr(asked, axis) for axis in _COST}
    changed = sum(factor != 1 for factor in factors.values())
    effort = sum(_COST[axis] * abs(math.log2(factor)) for axis, factor in factors.items())
    return changed, effort, (-grid.tp, -grid.cp, -grid.pp)  # the last entry only breaks ties
