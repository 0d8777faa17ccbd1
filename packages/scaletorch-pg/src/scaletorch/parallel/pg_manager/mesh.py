"""The grid as a PyTorch DeviceMesh, over process groups that exist already."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ...dist import get_comm_device
from .grid import ORDER, Grid

# Mesh dims of experts; FSDP2 wants the replicating dim (edp) before the sharding one (ep).
EXPERT_DIMS = ("edp", "pp", "ep", "etp")


def make_device_mesh(grid: Grid, group_of: Callable[[str], ProcessGroup | None]) -> DeviceMesh:
    """Make a mesh of shape [DP, PP, CP, TP] without creating any group.

    Args:
        grid: The layout.
        group_of: Returns this rank's group of an axis.
    """
    shape = [getattr(grid, axis) for axis in ORDER]
    return _make_mesh(torch.arange(grid.world_size).view(shape), ORDER, group_of)


def make_expert_mesh(grid: Grid, group_of: Callable[[str], ProcessGroup | None]) -> DeviceMesh:
    """Make a mesh of shape [EDP, PP, EP, ETP], the expert axes of the grid.

    Args:
        grid: The layout.
        group_of: Returns this rank's group of an axis.
    """
    stages = torch.arange(grid.world_size).view(grid.dp, grid.pp, -1).transpose(0, 1)
    ranks = stages.reshape(grid.pp, grid.edp, grid.ep, grid.etp).transpose(0, 1)
    return _make_mesh(ranks, EXPERT_DIMS, group_of)


def _make_mesh(
    ranks: Tensor, dims: tuple[str, ...], group_of: Callable[[str], ProcessGroup | None]
) -> DeviceMesh:
    groups = [group for axis in dims if (group := group_of(axis)) is not None]
    device = get_comm_device().type
    return DeviceMesh.from_group(groups, device, mesh=ranks.int(), mesh_dim_names=dims)
