"""The way by host memory: large tensors of processes of one host, which read one another's.

Reading takes turns, in which all ranks are at one call: it serves synchronous calls alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from ..wire.recipes import Recipe
from ..world.info import group_ranks, info_of
from . import neighbours
from . import reading_calls as calls
from .neighbours import MOST, Neighbours

T = TypeVar("T")
Done = Callable[[Tensor], T]


def memory_way(group: ProcessGroup) -> MemoryWay | None:
    """Return the way by host memory, None if the ranks cannot read one another's."""
    info = info_of(group)
    if info.memory is ...:
        near = neighbours.find(group)
        info.memory = None if near is None else MemoryWay(near)
    return info.memory  # type: ignore[no-any-return]


def way_together(tensors: Sequence[Tensor], group: ProcessGroup) -> MemoryWay | None:
    """Return the way by host memory if it serves one call for several tensors, else None."""
    if sum(data.nbytes for data in tensors) < neighbours.LEAST:
        return None
    if info_of(group).levels is not None or not all(data.is_cpu for data in tensors):
        return None
    return memory_way(group)


class MemoryWay:
    """How tensors travel if the ranks can read one another's memory; calls as in `ways.Way`.

    Attributes:
        near: The ranks.
        spoils: As in `ways.Way`.
    """

    __slots__ = ("near",)

    spoils = False

    def __init__(self, near: Neighbours) -> None:
        self.near = near

    @property
    def group(self) -> ProcessGroup:
        """The ranks."""
        return self.near.group

    def all_reduce(self, buffer: Tensor, recipe: Recipe, done: Done[T], async_op: bool) -> T:
        """Reduce a tensor in place: each rank its range of everybody's, in rank order."""
        calls.all_reduce(self.near, [buffer], recipe.run)
        return done(buffer)

    def all_reduce_together(self, buffers: Sequence[Tensor], recipe: Recipe) -> None:
        """Reduce packed tensors of one dtype in place, many in one turn."""
        for start in range(0, len(buffers), MOST):
            calls.all_reduce(self.near, buffers[start : start + MOST], recipe.run)

    def reduce(self, buffer: Tensor, dst: int, recipe: Recipe, done: Done[T], async_op: bool) -> T:
        """Reduce a tensor in place on global rank `dst`."""
        calls.reduce(self.near, buffer, dst, recipe.run)
        return done(buffer)

    def reduce_scatter(
        self, data: Tensor, counts: Sequence[int], recipe: Recipe, done: Done[T], async_op: bool
    ) -> T:
        """Reduce to each rank its shard of a flat tensor."""
        return done(calls.reduce_parts(self.near, data, counts, recipe.run, recipe.pack))

    def all_gather(self, own: Tensor, done: Done[T], async_op: bool) -> T:
        """Collect the tensors of all ranks in rows of one new tensor."""
        rows = own.new_empty((self.group.size(), *own.shape))
        calls.all_gather(self.near, rows, own)
        return done(rows)

    def gather_flat(self, data: Tensor, counts: Sequence[int], done: Done[T], async_op: bool) -> T:
        """Fill a flat tensor with the shards of all."""
        bounds = pairwise(accumulate(counts, initial=0))
        calls.gather_flat(self.near, data, [range(*pair) for pair in bounds])
        return done(data)

    def gather(self, own: Tensor, dst: int, done: Done[T], async_op: bool) -> T:
        """Collect the tensors of all ranks on global rank `dst`."""
        group = self.group
        mine = group_ranks(group)[group.rank()] == dst
        rows = own.new_empty((group.size() if mine else 0, *own.shape))
        calls.gather(self.near, rows if len(rows) else None, own)
        return done(rows)

    def broadcast(self, buffer: Tensor, src: int, done: Done[T], async_op: bool) -> T:
        """Fill a tensor with that of global rank `src`."""
        calls.broadcast(self.near, buffer, src)
        return done(buffer)

    def scatter(
        self,
        buffer: Tensor,
        entries: Sequence[Tensor] | None,
        src: int,
        done: Done[T],
        async_op: bool,
    ) -> T:
        """Fill a tensor with this rank's entry of the list of global rank `src`."""
        calls.scatter(self.near, buffer, entries, src)
        return done(buffer)

    def all_to_all(self, sent: Tensor, done: Done[T], async_op: bool) -> T:
        """Collect everybody's block for this rank."""
        received = sent.new_empty(sent.shape)
        calls.all_to_all(self.near, received, sent)
        return done(received)
