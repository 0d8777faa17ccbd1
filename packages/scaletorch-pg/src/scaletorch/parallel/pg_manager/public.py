"""All public names of the package, each imported on first access."""

from .grid import Coordinates as Coordinates
from .grid import ExpertCoordinates as ExpertCoordinates
from .grid import Grid as Grid
from .grid import PipelineNeighbours as PipelineNeighbours
from .grid import RingNeighbours as RingNeighbours
from .grid import count_communicators as count_communicators
from .grid import layout_name as layout_name
from .grid import legal_layouts as legal_layouts
from .grid import parse_layout as parse_layout
from .loss import IGNORED as IGNORED
from .loss import global_token_count as global_token_count
from .loss import global_token_mean as global_token_mean
from .loss import token_loss_sum as token_loss_sum
from .manager import ProcessGroupManager as ProcessGroupManager
from .manager import axis_group as axis_group
from .manager import describe_rank as describe_rank
from .manager import destroy_process_group_manager as destroy_process_group_manager
from .manager import get_process_group_manager as get_process_group_manager
from .manager import setup_process_group_manager as setup_process_group_manager
from .module_helpers import ModuleWrapper as ModuleWrapper
