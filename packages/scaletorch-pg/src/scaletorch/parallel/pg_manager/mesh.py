"""The grid described to the rest of PyTorch: a DeviceMesh over groups that exist already."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ...dist import get_comm_device
from .grid import ORDER, Grid


def make_device_mesh(grid: Grid, group_of: Callable[[str], ProcessGroup | None]) -> DeviceMesh:
    """Make a mesh of shape [DP, PP, CP, TP] without creating any group.

    Args:
        grid: The layout.
        group_of: Returns this rank's group of an axis.
    """
    shape = [getattr(grid, axis) for axis in ORDER]
    groups = [group for axis in ORDER if (group := group_of(axis)) is not None]
    return DeviceMesh.from_group(
        groups,
        get_comm_device().type,
        mesh=torch.arange(grid.world_size, dtype=torch.int).view(shape),
        mesh_dim_names=ORDER,
    )
