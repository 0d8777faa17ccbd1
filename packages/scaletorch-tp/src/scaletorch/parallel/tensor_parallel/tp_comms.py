"""Differentiable communication functions of tensor-parallel layers.

The last argument `group` may be left out. It is then the tensor-parallel axis of the current
`ProcessGroupManager`, or one process without torch.distributed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from ...dist import get_world_size
from ...dist.functional import Copy, Gather, Reduce
from ..pg_manager import axis_group
from ..pg_manager.building import uncompiled
from .regions.region import Entrance, enter


class _OnAxis:
    """Base before a collective of dist: without a group it is the tensor-parallel axis."""

    _dim: ClassVar[Mapping[str, int]] = {}  # the dim of collectives that take one

    @classmethod
    def forward(cls, ctx: Any, x: Tensor, group: ProcessGroup | None = None) -> Tensor:
        where = *cls._dim.values(), axis_group("tp", group)
        return super().forward(ctx, x, *where)  # type: ignore[misc,no-any-return]

    @classmethod
    def spmd_typecheck(cls, *, x: Tensor, group: ProcessGroup | None) -> Any:
        where = {**cls._dim, "group": axis_group("tp", group)}
        return super().spmd_typecheck(x=x, **where)  # type: ignore[misc]


class CopyToModelParallelRegion(_OnAxis, Copy):
    """Identity on a replicated tensor; backward sums the gradient over the ranks."""


class ReduceFromModelParallelRegion(_OnAxis, Reduce):
    """Sum partial results over the ranks; backward is the identity."""


class GatherFromModelParallelRegion(_OnAxis, Gather):  # type: ignore[misc]
    """All-gather shards [..., n / tp] to [..., n]; backward keeps this rank's slice."""

    _dim: ClassVar[Mapping[str, int]] = {"dim": -1}


def linear_with_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, group: ProcessGroup | None = None
) -> Tensor:
    """Apply this rank's rows of a linear layer to a replicated `x`.

    Args:
        x: [..., in_features], the same on every rank.
        weight: [out_features / tp, in_features].
        bias: [out_features / tp] or None.
        group: Ranks of the tensor-parallel axis.

    Returns:
        [..., out_features / tp]. In backward the gradient of `x` is summed over the ranks.
    """
    return functional.linear(enter(x, axis_group("tp", group)), weight, bias)


@uncompiled
def linear_with_async_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, group: ProcessGroup | None = None
) -> Tensor:
    """Apply `linear_with_all_reduce` with a backward that overlaps sending and computing.

    The input's gradient is all-reduced while the weight's gradient is computed. Values are those of
    `linear_with_all_reduce`, also under `torch.autocast`.
    """
    group = axis_group("tp", group)
    if get_world_size(group) == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return functional.linear(x, weight, bias)
    return Entrance(x, {"layer": (weight, bias)}, group).linear("layer")
