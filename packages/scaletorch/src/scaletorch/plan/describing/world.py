"""A simulated world of ranks in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as c10d
from torch import Tensor

from ...dist.errors import InvalidArgumentError
from ...parallel.pg_manager import (
    Grid,
    ProcessGroupManager,
    destroy_process_group_manager,
    setup_process_group_manager,
)

_COUNTED = 64  # elements; larger tensors are hollow


@contextmanager
def pretended(grid: Grid) -> Iterator[ProcessGroupManager]:
    """Become rank 0 of a grid of simulated ranks: collectives return at once.

    Raises:
        InvalidArgumentError: This process has a process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if c10d.is_initialized():
        raise InvalidArgumentError(
            "a model is described before init_dist, in a process without a process group: "
            "describe it first, or in a process of its own"
        )
    excepthook = sys.excepthook  # torch wraps it each time a process group is created
    c10d.init_process_group("fake", rank=0, world_size=grid.world_size, store=FakeStore())
    all_reduce = c10d.all_reduce
    try:
        sizes = {f"{axis}_size": getattr(grid, axis) for axis in ("tp", "cp", "pp", "dp", "ep")}
        c10d.all_reduce = _all_alike(all_reduce)
        yield setup_process_group_manager(**sizes)
    finally:
        c10d.all_reduce = all_reduce
        sys.excepthook = excepthook
        destroy_process_group_manager()
        if c10d.is_initialized():
            c10d.destroy_process_group()


def _all_alike(all_reduce: Any) -> Any:
    """Wrap `all_reduce` so that a sum of few numbers is as if all ranks were identical."""

    def run(
        tensor: Tensor, op: Any = c10d.ReduceOp.SUM, group: Any = None, *rest: Any, **options: Any
    ) -> Any:
        work = all_reduce(tensor, op, group, *rest, **options)
        if op == c10d.ReduceOp.SUM and tensor.numel() <= _COUNTED:
            tensor.mul_(c10d.get_world_size(group))
        return work

    return run
