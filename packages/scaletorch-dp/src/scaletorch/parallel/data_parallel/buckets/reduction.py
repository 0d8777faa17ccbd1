"""The reduction of a buffer of gradients over the group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....dist import Work, get_rank, get_world_size
from ....dist.building import all_gather_flat, all_reduce_flat, reduce_scatter_flat, sum_dtype
from ....dist.errors import InvalidArgumentError

OPS = ("sum", "mean")


@dataclass(frozen=True)
class Reduction:
    """The options of a reduction."""

    op: str  # "sum" or "mean" over the group
    group: ProcessGroup | None  # the ranks; None is this process alone
    dtype: torch.dtype | None = None  # of buffers in transit; None leaves them unchanged

    def __post_init__(self) -> None:
        if self.op not in OPS:
            choices = ", ".join(map(repr, OPS))
            raise InvalidArgumentError(f"op must be one of {choices}, got {self.op!r}")
        check_floating("reduce_dtype", self.dtype)

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        """This rank's index in the group."""
        return get_rank(self.group)

    def folds(self, dtype: torch.dtype) -> bool:
        """Return whether each rank adds up its shard of a buffer of this dtype, in float32."""
        travels = dtype if self.dtype is None or not dtype.is_floating_point else self.dtype
        return self.size > 1 and sum_dtype(travels) is not travels

    def multiple(self, dtype: torch.dtype) -> int:
        """Return the factor that a buffer's length must have, so that shards are even."""
        return self.size if self.folds(dtype) else 1

    def gather(self, data: Tensor, counts: list[int]) -> Work[Any]:
        """Start gathering the ranks' shards of a flat tensor, in place."""
        work = all_gather_flat(data, counts, self.group, async_op=True)
        return work if isinstance(work, Work) else Work((), lambda: None)

    def whole(self, buffer: Tensor) -> Work[Tensor]:
        """Start reducing a flat buffer, in place; the work returns it."""
        wire = self._wire(buffer)
        work = all_reduce_flat(wire, self.op, group=self.group)
        return work if wire is buffer else Work((work,), lambda: buffer.copy_(wire))

    def shard(self, buffer: Tensor, counts: list[int]) -> Work[Tensor]:
        """Start reduce-scattering a flat buffer; the work returns this rank's shard."""
        return reduce_scatter_flat(self._wire(buffer), counts, self.op, self.group)

    def _wire(self, buffer: Tensor) -> Tensor:
        dtype = self.dtype if buffer.dtype.is_floating_point else None
        return buffer if dtype is None else buffer.to(dtype)


def check_floating(name: str, dtype: object) -> None:
    """Refuse anything but a floating dtype or None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidArgumentError(f"{name} must be a floating-point dtype or None, got {dtype!r}")
