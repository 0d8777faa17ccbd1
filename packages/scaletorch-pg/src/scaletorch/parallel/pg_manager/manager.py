"""The process group manager: one rank's coordinates in the grid and a process group per axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ...dist import (
    get_comm_device,
    get_default_group,
    get_local_rank,
    get_rank,
    get_world_size,
    require_member,
)
from ...dist.building import agree, caught
from ...dist.errors import InvalidArgumentError, StateError
from .grid import AXES, ORDER, Grid
from .groups import GroupSet, first_unused_number, grouped_axis

_current: ProcessGroupManager | None = None


class ProcessGroupManager:
    """This rank's coordinates, process groups and neighbours in a `Grid`.

    Every rank of the default group must create one, with the same sizes. It creates only the
    groups that contain this rank, with the timeout of the default group; axes with equal ranks
    share one group. Without torch.distributed all groups are None.

    For each axis (`tp`, `cp`, `pp`, `dp`, `cp_dp`, `pp_dp`, `ep`, `edp`, `etp`, `world`) it has

    - `{axis}_group`, the process group or None,
    - `{axis}_size`, and the same number as `{axis}_world_size`,
    - `{axis}_rank`, this rank's position in the group, from 0,
    - `{axis}_first_rank`, `{axis}_last_rank` and the list `{axis}_group_ids`, as global ranks.

    `world_size` is the number of all ranks.

    Args:
        tp_size: Tensor parallel size.
        cp_size: Context parallel size.
        pp_size: Pipeline parallel size.
        dp_size: Data parallel size; the product of the four is the world size.
        ep_size: Expert parallel size: the number of ranks that a layer's experts are divided over.
        etp_size: Expert tensor parallel size, 1 or `tp_size`; None means `tp_size` if `ep_size`
            is 1, else 1.

    Attributes:
        grid: The layout, with its expert axes.
        global_rank: This process's rank in the world.
        local_rank: This process's rank on its host.
        cp_send_rank: Global rank of the next rank in the cp ring.
        cp_recv_rank: Global rank of the previous rank in the cp ring.
        pp_is_first_stage: Whether this rank holds the first pipeline stage.
        pp_is_last_stage: Whether this rank holds the last pipeline stage.
        pp_prev_rank: Global rank of the previous stage, None at the first.
        pp_next_rank: Global rank of the next stage, None at the last.

    Raises:
        InvalidArgumentError: The sizes are invalid, or their product is not the world size.
        MismatchError: Ranks were given different sizes, or another rank could not create its
            groups; raised on every rank.
    """

    tp_group: ProcessGroup | None
    tp_size: int
    tp_world_size: int
    tp_rank: int
    tp_first_rank: int
    tp_last_rank: int
    tp_group_ids: list[int]

    cp_group: ProcessGroup | None
    cp_size: int
    cp_world_size: int
    cp_rank: int
    cp_first_rank: int
    cp_last_rank: int
    cp_group_ids: list[int]

    pp_group: ProcessGroup | None
    pp_size: int
    pp_world_size: int
    pp_rank: int
    pp_first_rank: int
    pp_last_rank: int
    pp_group_ids: list[int]

    dp_group: ProcessGroup | None
    dp_size: int
    dp_world_size: int
    dp_rank: int
    dp_first_rank: int
    dp_last_rank: int
    dp_group_ids: list[int]

    cp_dp_group: ProcessGroup | None
    cp_dp_size: int
    cp_dp_world_size: int
    cp_dp_rank: int
    cp_dp_first_rank: int
    cp_dp_last_rank: int
    cp_dp_group_ids: list[int]

    pp_dp_group: ProcessGroup | None
    pp_dp_size: int
    pp_dp_world_size: int
    pp_dp_rank: int
    pp_dp_first_rank: int
    pp_dp_last_rank: int
    pp_dp_group_ids: list[int]

    ep_group: ProcessGroup | None
    ep_size: int
    ep_world_size: int
    ep_rank: int
    ep_first_rank: int
    ep_last_rank: int
    ep_group_ids: list[int]

    edp_group: ProcessGroup | None
    edp_size: int
    edp_world_size: int
    edp_rank: int
    edp_first_rank: int
    edp_last_rank: int
    edp_group_ids: list[int]

    etp_group: ProcessGroup | None
    etp_size: int
    etp_world_size: int
    etp_rank: int
    etp_first_rank: int
    etp_last_rank: int
    etp_group_ids: list[int]

    world_group: ProcessGroup | None
    world_size: int
    world_rank: int
    world_first_rank: int
    world_last_rank: int
    world_group_ids: list[int]

    def __init__(
        self, tp_size: int = 1, cp_size: int = 1, pp_size: int = 1, dp_size: int = 1,
        ep_size: int = 1, etp_size: int | None = None,
    ) -> None:  # fmt: skip
        sizes = tp_size, cp_size, pp_size, dp_size, ep_size, etp_size
        problem = caught(Grid, *sizes)  # raised after the other ranks know of it
        self.grid = grid = Grid(*sizes) if problem is None else Grid()
        numbers = agree("the layout", [str(grid)], error=problem, note=first_unused_number())
        world_size = get_world_size()
        if grid.world_size != world_size:
            raise InvalidArgumentError(
                f"the layout needs tp * cp * pp * dp = {grid.tp} * {grid.cp} * {grid.pp} * "
                f"{grid.dp} = {grid.world_size} ranks, but the world has {world_size}: choose "
                f"sizes whose product is {world_size}"
            )
        self.global_rank = get_rank()
        self.local_rank = get_local_rank()
        self._destroyed = False
        self._groups: GroupSet | None = None
        if get_default_group() is not None:
            self._groups = GroupSet(grid, self.global_rank, max(numbers))
        self._mesh: DeviceMesh | None = None
        for axis in AXES:
            members = list(grid.group(axis, self.global_rank))
            setattr(self, f"{axis}_size", len(members))
            if axis != "world":
                setattr(self, f"{axis}_world_size", len(members))
            setattr(self, f"{axis}_rank", members.index(self.global_rank))
            setattr(self, f"{axis}_first_rank", members[0])
            setattr(self, f"{axis}_last_rank", members[-1])
            setattr(self, f"{axis}_group_ids", members)
        self.cp_send_rank, self.cp_recv_rank = grid.ring_neighbours("cp", self.global_rank)
        self.pp_prev_rank, self.pp_next_rank = grid.pipeline_neighbours(self.global_rank)
        self.pp_is_first_stage = self.pp_prev_rank is None
        self.pp_is_last_stage = self.pp_next_rank is None

    def __str__(self) -> str:
        """Short form, such as `TP(2)-CP(1)-PP(2)-DP(1)-Rank(0)`."""
        return f"{self.grid}-Rank({self.global_rank})"

    def __repr__(self) -> str:
        return f"ProcessGroupManager({self})"

    def group(self, axis: str) -> ProcessGroup | None:
        """Return the process group of `axis`; None without torch.distributed.

        Args:
            axis: `"tp"`, `"cp"`, `"pp"`, `"dp"`, `"cp_dp"`, `"pp_dp"`, `"ep"`, `"edp"`, `"etp"`
                or `"world"`.

        Raises:
            InvalidArgumentError: `axis` is unknown or has no process group.
            StateError: The manager was destroyed, or its default group was.
        """
        name = grouped_axis(axis)
        if not self.is_alive():
            raise StateError(
                f"the {name} group of {self} is gone: its manager or its default group was "
                "destroyed; call setup_process_group_manager again"
            )
        return None if self._groups is None else self._groups.get(name)

    if not TYPE_CHECKING:  # declared above

        def __getattr__(self, name: str) -> ProcessGroup | None:
            """Return the group of an axis for the attribute `{axis}_group`."""
            axis = name.removesuffix("_group")
            if axis != name and axis in AXES:
                return self.group(axis)
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=self)

    @property
    def device_mesh(self) -> DeviceMesh:
        """A DeviceMesh `("dp", "pp", "cp", "tp")` over the same groups, created on first access.

        Slice it for FSDP2, DTensor and torch.distributed.checkpoint: `device_mesh["dp"]`.

        Raises:
            StateError: Without torch.distributed there are no groups to describe, or they are gone.
        """
        groups = [group for axis in ORDER if (group := self.group(axis)) is not None]
        if not groups:
            raise StateError("device_mesh needs process groups: make the manager after init_dist")
        if self._mesh is None:
            shape = [getattr(self.grid, axis) for axis in ORDER]
            ranks = torch.arange(self.world_size, dtype=torch.int).view(shape)
            device = get_comm_device().type
            self._mesh = DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=ORDER)
        return self._mesh

    def get_info(self) -> dict[str, Any]:
        """Return layout, coordinates and groups as plain data (ints, strings, lists, dicts)."""
        return {
            "layout": str(self.grid),
            "world_size": self.world_size,
            "global_rank": self.global_rank,
            "local_rank": self.local_rank,
            "coordinates": self.grid.coordinates(self.global_rank)._asdict(),
            "expert_coordinates": self.grid.expert_coordinates(self.global_rank)._asdict(),
            "groups": {axis: getattr(self, f"{axis}_group_ids") for axis in AXES},
            "cp_send_rank": self.cp_send_rank,
            "cp_recv_rank": self.cp_recv_rank,
            "pp_prev_rank": self.pp_prev_rank,
            "pp_next_rank": self.pp_next_rank,
        }

    def destroy(self) -> None:
        """Destroy the groups that the manager created, not WORLD; a second call does nothing."""
        if self._groups is not None and self.is_alive():
            self._groups.destroy()
        self._mesh, self._destroyed = None, True

    def is_alive(self) -> bool:
        """Return whether the groups exist: neither they nor the default group were destroyed."""
        if self._groups is None:
            return not self._destroyed and get_default_group() is None
        world = self._groups.get("world")
        return world is not None and world is get_default_group()


def setup_process_group_manager(
    tp_size: int = 1, cp_size: int = 1, pp_size: int = 1, dp_size: int = 1,
    ep_size: int = 1, etp_size: int | None = None,
) -> ProcessGroupManager:  # fmt: skip
    """Create the current manager; all ranks call this, once.

    Raises:
        StateError: A manager is set up already.
        InvalidArgumentError: The sizes are invalid, or their product is not the world size.
        MismatchError: As for `ProcessGroupManager`.
    """
    global _current
    old = get_process_group_manager()
    if old is not None:
        raise StateError(
            f"a process group manager is set up already ({old}); "
            "call destroy_process_group_manager() before another setup_process_group_manager()"
        )
    _current = ProcessGroupManager(tp_size, cp_size, pp_size, dp_size, ep_size, etp_size)
    return _current


def get_process_group_manager() -> ProcessGroupManager | None:
    """Return the current manager, or None.

    A manager lives as long as its default group: after `cleanup_dist` there is none.
    """
    return _current if _current is not None and _current.is_alive() else None


def __rank_state__() -> bool:
    """Return whether a manager is set up, so that reused test ranks notice a leftover one."""
    return get_process_group_manager() is not None


def destroy_process_group_manager() -> None:
    """Destroy the current manager and the groups it created; do nothing if there is none.

    All ranks call this; the default group stays.
    """
    global _current
    old, _current = _current, None
    if old is not None:
        old.destroy()


def axis_group(axis: str, group: ProcessGroup | None = None) -> ProcessGroup | None:
    """Return the group a strategy communicates over.

    An explicit `group` is returned as it is. Otherwise return the `axis` group of the current
    `ProcessGroupManager`, or None in a single process without a manager.

    Args:
        axis: As in `ProcessGroupManager.group`.
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
    raise StateError(
        f"{describe_rank()}: no process group for the {name} axis: this program runs "
        f"{world_size} ranks and has no process group manager; pass group=..., "
        "or call setup_process_group_manager first"
    )


def describe_rank() -> str:
    """Return this rank's name for messages: `rank 5 (dp0 pp1 cp0 tp1)`; `rank 5` without a manager.

    If the grid is not plain, expert coordinates follow: `rank 5 (dp0 pp1 cp0 tp1 edp0 ep1 etp0)`.
    """
    manager = get_process_group_manager()
    if manager is None:
        return f"rank {get_rank()}"
    grid, rank = manager.grid, manager.global_rank
    experts = "" if grid.is_plain else f" {grid.expert_coordinates(rank)}"
    return f"rank {rank} ({grid.coordinates(rank)}{experts})"
