"""All public names of the package, each imported on first access."""

from ._version import __version__
from .grid import (
    Coordinates,
    ExpertCoordinates,
    Grid,
    PipelineNeighbours,
    RingNeighbours,
    count_communicators,
)
from .layouts import layout_name, legal_layouts, parse_layout
from .loss import IGNORED, global_token_count, global_token_mean, token_loss_sum
from .manager import (
    ProcessGroupManager,
    axis_group,
    describe_rank,
    destroy_process_group_manager,
    get_process_group_manager,
    setup_process_group_manager,
)
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
    "axis_group",
    "count_communicators",
    "describe_rank",
    "destroy_process_group_manager",
    "get_process_group_manager",
    "global_token_count",
    "global_token_mean",
    "layout_name",
    "legal_layouts",
    "parse_layout",
    "setup_process_group_manager",
    "token_loss_sum",
]
