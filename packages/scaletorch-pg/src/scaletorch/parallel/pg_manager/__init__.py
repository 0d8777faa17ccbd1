"""The 4D grid [DP, PP, CP, TP], its process groups, and the one loss rule over them."""

from ._version import __version__
from .axis import axis_group, describe_rank
from .experts import ExpertCoordinates
from .grid import Coordinates, Grid, PipelineNeighbours, RingNeighbours
from .layouts import legal_layouts, nearest_layouts
from .loss import IGNORED, global_token_count, global_token_mean, token_loss_sum
from .manager import (
    ProcessGroupManager,
    destroy_process_group_manager,
    get_process_group_manager,
    setup_process_group_manager,
)
from .mpu import as_mpu
from .wrapper import ModuleWrapper

__all__ = [
    "IGNORED",
    "Coordinates",
    "ExpertCoordinates",
    "Grid",
    "ModuleWrapper",
    "PipelineNeighbours",
    "ProcessGroupManager",
    "RingNeighbours",
    "__version__",
    "as_mpu",
    "axis_group",
    "describe_rank",
    "destroy_process_group_manager",
    "get_process_group_manager",
    "global_token_count",
    "global_token_mean",
    "legal_layouts",
    "nearest_layouts",
    "setup_process_group_manager",
    "token_loss_sum",
]
