"""How a buffer of gradients is reduced over the group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....dist import Work, all_reduce, get_rank, get_world_size
from ....dist.building import (
    UNKEPT,
    NodeMemory,
    all_gather_flat,
    even_parts,
    part_of,
    reduce_scatter_flat,
)
from ....dist.errors import InvalidArgumentError

LEAST = 2**16  # elements for which memory is quicker than messages

OPS = ("sum", "mean")
ORDERS = ("any", "rank")


@dataclass(frozen=True)
class Reduction:
    """One way to reduce.

    Attributes:
        op: `"sum"` or `"mean"` over the group.
        group: The ranks; None is this process alone.
        dtype: To which buffers are cast while they travel; None leaves them as they are.
        order: `"any"`, the backend's, or `"rank"`: each element is what was there before,
            plus rank 0's, plus rank 1's, and so on, whatever the buckets and the backend.
        node: The ranks' common memory, if they are on one host; it takes the place of messages.
    """

    op: str
    group: ProcessGroup | None
    dtype: torch.dtype | None = None
    order: str = "any"
    node: NodeMemory | None = None

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

    @property
    def least_buckets(self) -> int:
        """Into how many buckets a model's gradients go at least, if these do not get too small."""
        # Messages travel while backward goes on; memory is read by whoever computes.
        return 8 if self.node is None else 3

    @property
    def multiple(self) -> int:
        """Of which number a buffer's length is a multiple, so that each rank can have its shard."""
        return self.size if self.ordered else 1

    def slot(self) -> int:
        """Return a number for buffers of which each takes the place of the one before."""
        return UNKEPT if self.node is None else self.node.slot()

    def empty(self, elements: int, like: Tensor, dtype: torch.dtype, slot: int = UNKEPT) -> Tensor:
        """Return a flat buffer of arbitrary values, in memory that is quick to reduce.

        Args:
            elements: How many.
            like: Of which device.
            dtype: Any.
            slot: As `slot` returns it, if the buffer is to be used again and again.
        """
        if self.node is not None and like.is_cpu:
            return self.node.empty(elements, dtype, slot)
        return torch.empty(elements, dtype=dtype, device=like.device)

    def gather(self, data: Tensor, counts: list[int]) -> Work[Any]:
        """Start filling a flat tensor, of which each rank has its shard, with the shards of all."""
        node = self._node_for(data)
        if node is not None:
            return node.all_gather(data, counts)
        work = all_gather_flat(data, counts, self.group, async_op=True)
        return work if isinstance(work, Work) else Work((), lambda: None)

    def forget(self) -> None:
        """Drop memory that is kept for buffers which are not used any more."""
        if self.node is not None:
            self.node.forget()

    def whole(self, buffer: Tensor, before: Tensor | None) -> Work[Tensor]:
        """Start reducing a buffer on every rank; the work gives the result, in the buffer.

        Args:
            buffer: Flat; its values are used up.
            before: With which the sum begins; only if it is in rank order.
        """
        if not buffer.numel():
            return Work((), lambda: buffer)
        node = self._node_for(buffer)
        if node is not None:
            counts = self.even(buffer.numel())
            start = None if before is None else self._own(before, counts)
            return node.all_reduce(buffer, counts, mean=self.op == "mean", start=start)
        if self.ordered:
            return self._in_rank_order(buffer, before)
        wire = self._wire(buffer)
        work = all_reduce(wire, self.op, group=self.group, async_op=True)
        if wire is buffer:
            return Work((work,), lambda: buffer)
        return Work((work,), lambda: buffer.copy_(wire))

    def shard(self, buffer: Tensor, counts: list[int], before: Tensor | None) -> Work[Tensor]:
        """Start reducing a buffer's shards, each to its rank; the work gives this rank's.

        Args:
            buffer: Flat, read until then.
            counts: Elements of each rank's shard.
            before: With which this rank's sum begins; only if it is in rank order.
        """
        node = self._node_for(buffer)
        if node is not None:
            return node.reduce_scatter(buffer, counts, mean=self.op == "mean", start=before)
        wire = self._wire(buffer)
        return reduce_scatter_flat(
            wire, counts, self.op, self.group, ordered=self.ordered, start=before
        )

    def even(self, elements: int) -> list[int]:
        """Return each rank's number of elements, even but for the last ones."""
        return even_parts(elements, self.size)

    def _in_rank_order(self, buffer: Tensor, before: Tensor | None) -> Work[Tensor]:
        counts = self.even(buffer.numel())
        own = self.shard(buffer, counts, None if before is None else self._own(before, counts))

        def finish() -> Tensor:
            self._own(buffer, counts).copy_(own.wait())
            all_gather_flat(buffer, counts, self.group)
            return buffer

        return Work((), finish)

    def _own(self, data: Tensor, counts: list[int]) -> Tensor:
        own = part_of(counts, self.rank)
        return data[own.start : own.stop]

    def _node_for(self, data: Tensor) -> NodeMemory | None:
        """Return the ranks' common memory, or None if messages are as good for this buffer."""
        fits = data.is_cpu and data.numel() >= LEAST and self.dtype is None
        return self.node if fits else None

    def _wire(self, buffer: Tensor) -> Tensor:
        dtype = self.dtype if buffer.dtype.is_floating_point else None
        return buffer if dtype is None else buffer.to(dtype)


def check_floating(name: str, dtype: object) -> None:
    """Refuse anything but a floating dtype or None.

    Raises:
        InvalidArgumentError: It is another thing than a floating dtype or None.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidArgumentError(f"{name} must be a floating-point dtype or None, got {dtype!r}")
