"""One run on the ranks: which calls and sizes, where, and what came out."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d

from ..collectives.reduce import all_reduce
from ..devices import get_comm_device
from ..errors import InvalidArgumentError
from ..world.hosts import get_local_size
from ..world.info import get_backend, get_world_size
from .axes import axis_group, memory_allows, parse_grid
from .cases import CASES, Place, place_of
from .fit import constants
from .measure import Row, measure, sizes_between
from .table import as_json


class Options(NamedTuple):
    """What is asked for; sizes in bytes.

    Attributes:
        calls: Names in `CASES`.
        least: Smallest size.
        most: Largest size; None for as much as memory allows.
        factor: Between sizes.
        seconds: For each call at each size.
        backend: None for that of this machine's device.
        grid: Such as `tp=2,dp=2`; "" for the world as one group.
        axis: Of the grid.
    """

    calls: tuple[str, ...] = tuple(CASES)
    least: int = 8
    most: int | None = 64 << 20
    factor: int = 8
    seconds: float = 0.25
    backend: str | None = None
    grid: str = ""
    axis: str = ""


def run(options: Options, tell: Callable[[Row], None]) -> dict[str, Any]:
    """Measure all on this rank; every rank of the world calls this.

    Args:
        options: The same on every rank.
        tell: Is given each row as it comes.

    Returns:
        What `as_json` makes of it.
    """
    grid = parse_grid(options.grid) if options.grid else {}
    group = axis_group(grid, options.axis) if grid else c10d.group.WORLD
    if group is None or group.size() < 2:
        message = f"calls are measured between ranks, and the group has {get_world_size(group)}"
        raise InvalidArgumentError(message)
    place = place_of(group, get_comm_device(group))
    allowed = _agreed_least(memory_allows(place.device, get_local_size()))
    most = min(allowed, options.most or allowed)
    rows: list[Row] = []
    for name in options.calls:
        sizes = sizes_between(options.least, most, options.factor)
        for size in [0] if CASES[name].largest == 0 else sizes:
            rows.append(measure(name, size, place, options.seconds))
            tell(rows[-1])
    return as_json(_conditions(options, place, most), rows, constants(rows, group.size()))


def _conditions(options: Options, place: Place, most: int) -> dict[str, Any]:
    return {
        "ranks": len(place.ranks),
        "world": get_world_size(),
        **({"grid": options.grid, "axis": options.axis} if options.grid else {}),
        "backend": get_backend(place.group),
        "device": place.device.type,
        "torch": torch.__version__,
        "host": platform.node(),
        "cores": os.cpu_count(),
        "largest": most,
    }


def _agreed_least(value: int) -> int:
    data = torch.tensor(value, dtype=torch.int64, device=get_comm_device())
    all_reduce(data, "min")
    return int(data)
