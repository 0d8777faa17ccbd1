"""The group of an axis of a grid, and what memory allows."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup

from ..errors import InvalidArgumentError
from ..world.info import get_timeout, get_world_size

ORDER = ("dp", "pp", "cp", "tp")  # ranks next to each other differ in the last
COPIES = 6  # of a size that a rank may need at once


def parse_grid(text: str) -> dict[str, int]:
    """Read `tp=2,dp=2`; the axes in the order of the grid.

    Raises:
        InvalidArgumentError: An unknown axis, one twice, or a size that is none.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in ORDER or name in sizes or not size.isdigit() or int(size) < 1:
            message = (
                f"--grid needs axes such as tp=2,dp=2, each of {', '.join(ORDER)} at most once, "
                f"got {text!r}"
            )
            raise InvalidArgumentError(message)
        sizes[name] = int(size)
    return {name: sizes[name] for name in ORDER if name in sizes}


def axis_group(grid: dict[str, int], axis: str) -> ProcessGroup:
    """Return this rank's group along an axis; every rank of the world calls this.

    Raises:
        InvalidArgumentError: The grid does not have the axis, or is not as large as the world.
    """
    world = get_world_size()
    if axis not in grid:
        raise InvalidArgumentError(f"--axis {axis} is not in the grid, which has {', '.join(grid)}")
    if math.prod(grid.values()) != world:
        sizes = " * ".join(map(str, grid.values()))
        message = (
            f"the grid needs {sizes} = {math.prod(grid.values())} ranks, the world has {world}"
        )
        raise InvalidArgumentError(message)
    place = list(grid).index(axis)
    ranks = torch.arange(world).view(*grid.values()).movedim(place, -1).reshape(-1, grid[axis])
    groups = [c10d.new_group(members, timeout=get_timeout()) for members in ranks.tolist()]
    return next(group for group in groups if isinstance(group, ProcessGroup) and group.rank() >= 0)


def memory_allows(device: torch.device, local_ranks: int) -> int:
    """Return the largest size, in bytes, that ranks on this machine can all hold, rounded down."""
    if device.type == "cpu":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_ranks
    else:
        module: Any = getattr(torch, device.type)
        free = module.mem_get_info(device)[0]
    return 1 << max(3, (free // COPIES).bit_length() - 1)
