"""How a buffer of gradients is reduced over the group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....dist import Work, all_reduce, get_rank, get_world_size
from ....dist.collectives.flat import all_gather_flat, part_of, reduce_scatter_flat
from ....dist.errors import InvalidArgumentError

OPS = ("sum", "mean")
ORDERS = ("any", "rank")


@dataclass(frozen=True)
class Reduction:
    """One way to reduce.

    Attributes:
        op: ``"sum"`` or ``"mean"`` over the group.
        group: The ranks; None is this process alone.
        dtype: What buffers are cast to while they travel; None leaves them as they are.
        order: ``"any"``, the backend's, or ``"rank"``: each element is what was there before,
            plus rank 0's, plus rank 1's, and so on, whatever the buckets and the backend.
    """

    op: str
    group: ProcessGroup | None
    dtype: torch.dtype | None = None
    order: str = "any"

    def __post_init__(self) -> None:
        for name, value, known in (("op", self.op, OPS), ("order", self.order, ORDERS)):
            if value not in known:
                choices = ", ".join(map(repr, known))
                raise InvalidArgumentError(f"{name} must be one of {choices}, got {value!r}")
        check_floating("reduce_dtype", self.dtype)

    @cached_property
    def size(self) -> int:
        """Ranks of the group."""
        return get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        """This rank's place in the group."""
        return get_rank(self.group)

    @property
    def ordered(self) -> bool:
        """Whether sums are in rank order."""
        return self.order == "rank"

    def whole(self, buffer: Tensor, before: Tensor | None) -> Work[Tensor]:
        """Start reducing a buffer on every rank; the work gives the result, in the buffer.

        Args:
            buffer: Flat; its values are used up.
            before: What the sum begins with, only where it is in rank order.
        """
        if not buffer.numel():
            return Work((), lambda: buffer)
        if self.ordered:
            return self._in_rank_order(buffer, before)
        wire = self._wire(buffer)
        work = all_reduce(wire, self.op, group=self.group, async_op=True)
        if wire is buffer:
            return Work((work,), lambda: buffer)
        return Work((work,), lambda: buffer.copy_(wire))

    def part(self, buffer: Tensor, counts: list[int], before: Tensor | None) -> Work[Tensor]:
        """Start reducing a buffer's parts, each to its rank; the work gives this rank's.

        Args:
            buffer: Flat, read until then.
            counts: Elements of each rank's part.
            before: What this rank's sum begins with, only where it is in rank order.
        """
        wire = self._wire(buffer)
        return reduce_scatter_flat(
            wire, counts, self.op, self.group, ordered=self.ordered, start=before
        )

    def even(self, elements: int) -> list[int]:
        """Return counts that part a buffer evenly, the last parts shorter."""
        share = -(-elements // self.size)
        return [max(min(share, elements - share * at), 0) for at in range(self.size)]

    def _in_rank_order(self, buffer: Tensor, before: Tensor | None) -> Work[Tensor]:
        counts = self.even(buffer.numel())
        own = part_of(counts, self.rank)
        mine = None if before is None else before[own.start : own.stop]
        parts = self.part(buffer, counts, mine)

        def finish() -> Tensor:
            buffer[own.start : own.stop] = parts.wait()
            all_gather_flat(buffer, counts, self.group)
            return buffer

        return Work((), finish)

    def _wire(self, buffer: Tensor) -> Tensor:
        dtype = self.dtype if buffer.dtype.is_floating_point else None
        return buffer if dtype is None else buffer.to(dtype)


def check_floating(name: str, dtype: object) -> None:
    """Refuse what is no floating dtype.

    Raises:
        InvalidArgumentError: It is another thing than a floating dtype or None.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidArgumentError(f"{name} must be a floating-point dtype or None, got {dtype!r}")
