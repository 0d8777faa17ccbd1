"""A layout as arguments: what is planned is what runs."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from ..compose import parallelize
from ..dist.errors import InvalidArgumentError
from ..parallel.data_parallel import DataParallelBucket
from ..parallel.pg_manager import ProcessGroupManager
from .layout import LOOPED, Layout

_RECOMPUTE = {"none": False, "selective": "selective", "full": True, "offload": "offload"}


def arguments(layout: Layout) -> dict[str, Any]:
    """Return what `parallelize` takes for a layout; `layout.zero` is for `shard_optimizer`."""
    chunked = LOOPED.get(layout.schedule)
    return {
        "sequence_parallel": layout.sequence_parallel,
        "recompute": _RECOMPUTE[layout.recompute],
        "schedule": partial(chunked, num_chunks=layout.chunks) if chunked else layout.schedule,
        "cp_method": layout.cp_method,
    }


def put_on(
    layout: Layout, model: nn.Module, manager: ProcessGroupManager, **options: Any
) -> DataParallelBucket:
    """Put a plain model on the grid as a layout says.

    Args:
        layout: The layout.
        model: As for `parallelize`.
        manager: Of the layout's grid.
        options: Further arguments of `parallelize`.

    Raises:
        InvalidArgumentError: The manager has another grid; and as `parallelize`.
    """
    if manager.grid != layout.grid:
        raise InvalidArgumentError(
            f"the plan is for {layout.grid}, and the manager has {manager.grid}"
        )
    return parallelize(model, manager, **{**arguments(layout), **options})
