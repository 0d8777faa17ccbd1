"""Layouts: their short names, and all that fit a world size."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...dist.errors import InvalidArgumentError
from .grid import Grid, default_etp, divisors

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
