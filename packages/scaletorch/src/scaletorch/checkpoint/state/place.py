"""Where this rank stands, and the processes that save and load together."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup

from ...dist import all_reduce, get_default_group, get_rank, get_timeout, get_world_size
from ...parallel.pg_manager import Grid, ProcessGroupManager, axis_group, get_process_group_manager

_control: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in the grid.

    Attributes:
        grid: The layout.
        rank: The global rank.
        tp: Place on the tensor-parallel axis.
        pp: Place in the pipeline.
        replica: Place among the ranks (cp x dp) that hold the same parameters.
        replicas: How many these are.
        expert_replica: Place among the ranks (edp) that hold the same experts.
        expert_replicas: How many these are.
        manager: The grid's groups; None in one process without one.
    """

    grid: Grid
    rank: int
    tp: int
    pp: int
    replica: int
    replicas: int
    expert_replica: int
    expert_replicas: int
    manager: ProcessGroupManager | None


def find_place(manager: ProcessGroupManager | None) -> Place:
    """Return this rank's place in the manager's grid; None is the current manager, if any.

    Raises:
        StateError: Several ranks and no manager.
    """
    manager = get_process_group_manager() if manager is None else manager
    if manager is None:
        axis_group("cp_dp")  # refuses several ranks
        return Place(Grid(), 0, 0, 0, 0, 1, 0, 1, None)
    grid, group = manager.grid, manager.group("cp_dp")
    return Place(
        grid,
        manager.global_rank,
        manager.tp_rank,
        manager.pp_rank,
        get_rank(group),
        get_world_size(group),
        manager.edp_rank,
        manager.edp_size,
        manager,
    )


def control_group() -> ProcessGroup | None:
    """Return a gloo group of all ranks for checkpoints alone, made once; None in one process.

    A save in the background then shares no group with training.
    """
    world = get_default_group()
    if world is None:
        return None
    if world not in _control:
        group = c10d.new_group(backend="gloo", timeout=get_timeout())
        all_reduce(torch.zeros(1), group=group)  # connects it before any rank goes on
        _control[world] = group
    return _control[world]
