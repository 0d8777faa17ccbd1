"""The default group of each strategy for `group=None`, and the rank's name in error messages."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from ...dist import get_rank, get_world_size, require_member
from ...dist.errors import StateError
from .grid import EXPERT_AXES
from .groups import grouped_axis
from .layouts import place_text
from .manager import get_process_group_manager


def axis_group(axis: str, group: ProcessGroup | None = None) -> ProcessGroup | None:
    """Return the group a strategy communicates over.

    An explicit `group` is returned as it is. Otherwise return the `axis` group of the current
    `ProcessGroupManager`, or None in a single process without a manager.

    Args:
        axis: `"tp"`, `"cp"`, `"pp"`, `"dp"`, `"cp_dp"`, `"pp_dp"`, `"ep"`, `"edp"`, `"etp"` or
            `"world"`.
        group: A process group that holds this rank.

    Raises:
        NotInGroupError: This rank is not in `group`.
        InvalidArgumentError: `axis` is unknown or has no process group.
        StateError: There are several ranks, but no group and no manager; WORLD is never a silent
            default.
    """
    name = grouped_axis(axis)
    if group is not None:
        require_member(group)
        return group
    manager = get_process_group_manager()
    if manager is not None:
        return manager.group(name)
    world_size = get_world_size()
    if world_size == 1:
        return None
    sizes = "tp_size, cp_size, pp_size, dp_size" + ", ep_size" * (name in EXPERT_AXES)
    message = (
        f"{describe_rank()}: no process group for the {name} axis: this program runs "
        f"{world_size} ranks and has no process group manager; pass group=..., "
        f"or call setup_process_group_manager({sizes}) first"
    )
    raise StateError(message)


def describe_rank() -> str:
    """Return this rank's name for messages: `rank 5 (dp0 pp1 cp0 tp1)`; `rank 5` without a manager.

    If the grid is not plain, it includes the expert coordinates:
    `rank 5 (dp0 pp1 cp0 tp1 edp0 ep1 etp0)`.
    """
    manager = get_process_group_manager()
    if manager is None:
        return f"rank {get_rank()}"
    return f"rank {manager.global_rank} ({place_text(manager.grid, manager.global_rank)})"
