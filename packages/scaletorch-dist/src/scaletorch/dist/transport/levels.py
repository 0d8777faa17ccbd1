"""Hierarchical collectives: inside each node, across the nodes, and inside again.

Data crosses nodes only once, in as many steps as there are nodes, not ranks. The ranks with one
local rank on their nodes form a group across nodes; all these groups work at once, each on its own
shard.

A call has at most three stages. Each stage has its own process group, on which every rank starts
the stages of all calls in the same order, so a call on slow links does not delay the calls after
it. There is no thread: the next call, a query or a wait starts all stages that have become ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from ..wire.backend import Route, Work, as_noted, last_note, nothing, process_group, route
from ..wire.recipes import Recipe, as_one, even_counts, recipe_for
from ..world.info import get_timeout, group_ranks, info_of, ranks_by_node
from .ways import Done, T, Way, way_of

Stage = tuple[int, Callable[[bool], Any]]  # a column, and the call that takes `async_op`
INSIDE, ACROSS, BACK, OVER = range(4)  # columns of stages, each but OVER with its own group


class Task:
    """A call that runs stage by stage; its `Work` waits for it as for a backend's handle."""

    __slots__ = ("_error", "_note", "_stages", "_way", "_work", "column")

    def __init__(self, way: LevelsWay, stages: Sequence[Stage]) -> None:
        self._way, self._stages = way, deque(stages)
        self._note = last_note()
        self._work: Work[Any] | None = None
        self.column = -1  # of the running stage; OVER if none is left
        self._error: Exception | None = None

    def advance(self, before: int, *, wait: bool = False) -> None:
        """Start the ready stages, behind the previous call's column `before`; keep an error."""
        # All ranks start the stages of a column in the same order, so no call overtakes another.
        while self.column < OVER and (wait or self._work is None or self._work.is_completed()):
            following = self._stages[0][0] if self._stages else OVER
            try:
                if self._work is not None:
                    work, self._work = self._work, None
                    work.wait()
                if following > before:
                    return
                if self._stages:
                    self._work = as_noted(self._note, self._stages.popleft()[1])
                self.column = following
            except Exception as error:
                self._error, self.column = error, OVER
            wait = False

    def wait(self) -> None:
        """Run this call's stages, and those of earlier calls, to the end."""
        self._way.advance(self)
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Return whether no stage is left."""
        self._way.advance()
        return self.column == OVER


class LevelsWay(Way):
    """Hierarchical collectives on a group that spans nodes.

    `inside` and `back` are groups of this node's ranks, `across` of the ranks with this local rank.
    `order` lists the group's ranks by local rank.
    """

    __slots__ = ("_tasks", "across", "back", "inside", "order")

    def __init__(
        self, group: ProcessGroup, route: Route, order: tuple[tuple[int, ...], ...], mine: list[int]
    ) -> None:
        super().__init__(group, route)
        ranks = group_ranks(group)
        column = order[mine.index(group.rank())]
        self.order = order
        self.inside, self.back = (_new_group([ranks[member] for member in mine]) for _ in range(2))
        self.across = _new_group([ranks[member] for member in column])
        self._tasks: deque[Task] = deque()

    def all_reduce(
        self, buffer: Tensor, recipe: Recipe, done: Done[T], async_op: bool
    ) -> T | Work[T]:
        """All-reduce: reduce-scatter in the node, all-reduce shards across nodes, all-gather."""
        flat = buffer.view(-1)
        counts = even_counts(flat.numel(), len(self.order))
        own = flat.split(counts)[self.inside.rank()]
        alike = recipe_for(recipe.run, flat.dtype)  # the buffer is packed already
        reduce = "reduce_here" if self.across.size() == 2 else "all_reduce"
        stages = [
            self._stage(INSIDE, "reduce_scatter", flat, counts, alike, own.copy_),
            self._stage(ACROSS, reduce, own, alike, own.copy_),
            self._stage(BACK, "gather_flat", flat, counts, nothing),
        ]
        if not own.numel():  # as on the other ranks of this column
            del stages[ACROSS]
        return self._make(stages, partial(done, buffer), async_op)

    def reduce_scatter(
        self, data: Tensor, counts: Sequence[int], recipe: Recipe, done: Done[T], async_op: bool
    ) -> T | Work[T]:
        """Reduce-scatter inside the node, by local rank, then across nodes."""
        entries = data.split(list(counts))
        by_place = [[entries[rank] for rank in ranks] for ranks in self.order]
        sizes = [sum(entry.numel() for entry in column) for column in by_place]
        joined = as_one([entry for column in by_place for entry in column])
        own = [entry.numel() for entry in by_place[self.inside.rank()]]
        found: list[Tensor] = []

        def across(later: bool) -> object:
            mine = found.pop()
            alike = recipe_for(recipe.run, mine.dtype)
            way = way_of(mine, self.across)
            return way.reduce_scatter(mine, own, alike, found.append, later)

        inside = self._stage(INSIDE, "reduce_scatter", joined, sizes, recipe, found.append)
        return self._make([inside, (ACROSS, across)], lambda: done(found.pop()), async_op)

    fold_scatter = reduce_scatter  # it adds 16-bit floats in float32 at both levels

    def all_gather(self, data: Tensor, done: Done[T], async_op: bool) -> T | Work[T]:
        """All-gather the tensors of all ranks: across nodes, then inside each."""
        rows = data.new_empty((self.group.size(), *data.shape))
        rows[self.group.rank()].copy_(data)
        counts = [data.numel()] * len(rows)
        return self.gather_flat(rows.view(-1), counts, lambda _: done(rows), async_op)

    def gather_flat(
        self, data: Tensor, counts: Sequence[int], done: Done[T], async_op: bool
    ) -> T | Work[T]:
        """All-gather the shards of a flat tensor in place: across nodes, then inside each."""
        shards, place = data.split(list(counts)), self.inside.rank()
        by_place = [[counts[rank] for rank in ranks] for ranks in self.order]
        sizes = [sum(column) for column in by_place]
        joined = torch.empty_like(data)  # the shards of one local rank are adjacent
        column = joined.split(sizes)[place]
        own = column.split(by_place[place])[self.across.rank()]
        own.copy_(shards[self.group.rank()])

        def finish() -> T:
            ordered = [shards[rank] for ranks in self.order for rank in ranks]
            came = joined.split([shard.numel() for shard in ordered])
            for shard, values in zip(ordered, came, strict=True):
                shard.copy_(values)
            return done(data)

        stages = [
            self._stage(ACROSS, "gather_flat", column, by_place[place], nothing),
            self._stage(BACK, "gather_flat", joined, sizes, nothing),
        ]
        return self._make(stages, finish, async_op)

    def advance(self, until: Task | None = None) -> None:
        """Start the stages of all calls that have become ready; run those of `until` to the end."""
        while self._tasks:
            before = OVER
            for task in self._tasks:
                task.advance(before)
                before = task.column
            while self._tasks and self._tasks[0].column == OVER:
                self._tasks.popleft()
            if until is None or until.column == OVER:
                return
            self._tasks[0].advance(OVER, wait=True)

    def _stage(self, column: int, call: str, data: Tensor, *arguments: Any) -> Stage:
        """Return a stage that makes a call of `Way` on this column's group."""
        group = (self.inside, self.across, self.back)[column]
        return column, lambda later: getattr(way_of(data, group), call)(data, *arguments, later)

    def _make(
        self, stages: Sequence[Stage], finish: Callable[[], T], async_op: bool
    ) -> T | Work[T]:
        if async_op:
            task = Task(self, stages)
            self._tasks.append(task)
            self.advance()
            return Work((task,), finish)
        if self._tasks:
            self.advance(self._tasks[-1])
        for _, stage in stages:
            stage(False)
        return finish()


def use_hierarchy(group: ProcessGroup | None = None) -> bool:
    """Use hierarchical collectives on a group, if possible.

    Every rank of the group must call this, once. It is possible on gloo, with several nodes and the
    same number of ranks, at least two, on each. The group's all-reduce, all-gather and
    reduce-scatter are then hierarchical, synchronous or not, for plain tensors, gradients and the
    differentiable collectives. The order of addition in sums changes.

    Args:
        group: The default group by default.

    Returns:
        Whether the group's collectives are hierarchical.

    Raises:
        NotInGroupError: This rank is outside the group.
    """
    members = process_group(group)
    if members is None:
        return False
    ways = info_of(members).ways
    if isinstance(ways.get("cpu"), LevelsWay):
        return True
    if members.size() < 4:
        return False
    nodes, found = ranks_by_node(members), route(torch.empty(0), members)
    sizes = {len(node) for node in nodes}
    if len(nodes) == 1 or len(sizes) > 1 or sizes == {1} or found.backend != "gloo":
        return False
    order = tuple(tuple(sorted(ranks)) for ranks in zip(*nodes, strict=True))
    mine = next(node for node in nodes if members.rank() in node)
    ways["cpu"] = LevelsWay(members, found, order, mine)
    return True


def _new_group(ranks: list[int]) -> ProcessGroup:
    group: ProcessGroup = c10d.new_group(
        ranks, timeout=get_timeout(), use_local_synchronization=True,
        group_desc="scaletorch_hierarchy",
    )  # fmt: skip
    return group
