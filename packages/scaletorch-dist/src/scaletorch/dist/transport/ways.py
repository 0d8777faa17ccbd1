"""Collectives on prepared tensors: directly by a group's backend, or hierarchically over nodes.

Every call takes contiguous tensors on the group's device, packed by a recipe if they are reduced,
and `done`, which maps the communicated tensor to the caller's result. A synchronous call returns
the result of `done`; an asynchronous one returns a `Work` whose `wait()` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from ..devices import get_comm_device
from ..errors import StateError
from ..wire.backend import (
    MOVABLE,
    Route,
    Work,
    all_gather_single,
    all_to_all_single,
    as_bytes,
    as_real,
    movable,
    raw_all_reduce,
    raw_broadcast,
    reduce_scatter_single,
    route,
    settled,
)
from ..wire.recipes import Recipe, fold
from ..world.info import group_ranks, info_of, infos

T = TypeVar("T")
Done = Callable[[Tensor], T]


def way_of(data: Tensor, group: ProcessGroup) -> Way:
    """Return the `Way` for a tensor on the group's device."""
    device = "cpu" if data.is_cpu else data.device.type
    try:
        return infos[group].ways[device]  # type: ignore[no-any-return]
    except KeyError:
        found = info_of(group).ways[device] = Way(group, route(data, group))
        return found


class Way:
    """Collectives of one group's backend on tensors of one device type, which has a route."""

    __slots__ = ("_known", "route")

    def __init__(self, group: ProcessGroup, route: Route) -> None:
        self._known = weakref.ref(group)  # a Way must not keep its group alive
        self.route = route

    @property
    def group(self) -> ProcessGroup:
        """The process group."""
        group = self._known()
        if group is None:
            raise StateError("the process group has been destroyed")
        return group

    def lacks(self, recipe: Recipe, packed: Tensor) -> bool:
        """Return whether the backend does not support the operation or the tensor's dtype."""
        return recipe.run in self.route.lacks or packed.dtype not in self.route.reduces

    def all_reduce(
        self, buffer: Tensor, recipe: Recipe, done: Done[T], async_op: bool
    ) -> T | Work[T]:
        """Reduce a tensor over the ranks; `buffer` may be overwritten."""
        if self.lacks(recipe, buffer):
            return self.reduce_here(buffer, recipe, done, async_op)
        handle = raw_all_reduce(buffer, recipe.raw, self._known(), async_op)
        return Work((handle,), partial(done, buffer)) if async_op else done(buffer)

    def reduce_scatter(
        self, data: Tensor, counts: Sequence[int], recipe: Recipe, done: Done[T], async_op: bool
    ) -> T | Work[T]:
        """Reduce-scatter a flat tensor that is not packed yet; `done` gets the shard, packed."""
        group = self.group
        length = counts[group.rank()]
        known = self.route
        # On gloo, an all-to-all and a local reduction are faster over TCP.
        native = known.backend != "gloo" and "reduce_scatter" not in known.lacks
        packed = recipe.pack(data) if native and min(counts) == max(counts) else None
        if packed is not None and not self.lacks(recipe, packed):
            output = packed.new_empty(length)
            ends = as_real(output), as_real(packed)
            handle = reduce_scatter_single(*ends, recipe.raw, group, async_op)
            return settled((handle,), partial(done, output), async_op, keep=packed)
        return self.fold_scatter(data, counts, recipe, done, async_op)

    def fold_scatter(
        self, data: Tensor, counts: Sequence[int], recipe: Recipe, done: Done[T], async_op: bool
    ) -> T | Work[T]:
        """Reduce-scatter: exchange shards and add them in rank order, 16-bit floats in float32."""
        length = counts[self.group.rank()]

        def finish(received: Tensor) -> T:
            packed = recipe.pack(received)
            return done(fold(packed.view(len(counts), packed.numel() // len(counts)), recipe.run))

        return self.exchange(data, counts, [length] * len(counts), finish, async_op)

    def all_gather(self, data: Tensor, done: Done[T], async_op: bool) -> T | Work[T]:
        """All-gather tensors of one shape into the rows of a new tensor."""
        group = self.group
        rows = data.new_empty((group.size(), *data.shape))
        flat = movable(rows).view(-1)
        handle = all_gather_single(flat, movable(data).view(-1), group, async_op)
        return settled((handle,), partial(done, rows), async_op, keep=data)

    def gather_flat(
        self, data: Tensor, counts: Sequence[int], done: Done[T], async_op: bool
    ) -> T | Work[T]:
        """All-gather the shards of a flat tensor in place; this rank has filled its own."""
        if not data.numel():
            return settled((), partial(done, data), async_op)
        group, shards = self.group, data.split(list(counts))
        if min(counts) == max(counts):
            shard = shards[group.rank()].clone()
            handles = [all_gather_single(movable(data), movable(shard), group, async_op)]
            return settled(handles, partial(done, data), async_op, keep=shard)
        ranks = group_ranks(group)
        filled = [(rank, one) for rank, one in zip(ranks, shards, strict=True) if one.numel()]
        handles = [raw_broadcast(movable(one), rank, group, async_op) for rank, one in filled]
        return settled(handles, partial(done, data), async_op)

    def exchange(
        self,
        data: Tensor,
        counts: Sequence[int],
        received_counts: Sequence[int],
        done: Done[T],
        async_op: bool,
    ) -> T | Work[T]:
        """Send slice i of a flat tensor to rank i; `done` gets the received ones, joined."""
        received = data.new_empty(sum(received_counts))
        sizes = [received_counts, counts]
        if data.dtype not in MOVABLE:
            sizes = [[count * data.element_size() for count in each] for each in sizes]
        handle = all_to_all_single(movable(received), movable(data), *sizes, self.group, async_op)
        return settled((handle,), partial(done, received), async_op, keep=data)

    def reduce_here(
        self, buffer: Tensor, recipe: Recipe, done: Done[T], async_op: bool
    ) -> T | Work[T]:
        """All-gather the tensors and reduce them locally, for two nodes or a missing feature."""
        size = self.group.size()
        flat = movable(buffer).view(-1)
        if not self.route.native and buffer.is_cpu:  # as bytes, which keep their precision
            flat = as_bytes(buffer).to(get_comm_device(self.group))
        rows = flat.new_empty(size * flat.numel())
        handle = all_gather_single(rows, flat, self.group, async_op)

        def finish() -> T:  # the rows may be bytes
            like = rows.to(buffer.device).view(buffer.dtype)
            return done(fold(like.view(size, -1), recipe.run))

        return settled((handle,), finish, async_op, keep=flat)
