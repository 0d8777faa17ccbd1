"""Sums and parts of flat tensors over the ranks of one host, through memory instead of sockets.

Bytes go through memory that every rank maps; who may read when goes through messages of the
group, so that a rank that dies or stays away shows as it does in any collective. A reduction is:
all are ready; each rank adds up its part of everybody's tensor, in rank order, and writes the sum
to its places; all are done.

No thread of its own does it, since ranks that share a host share its cores: whoever makes the next
call, asks for the state of one or waits for it does what has become possible of those before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from functools import partial
from itertools import count

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import StateError
from ..naming import name_ranks
from ..wire.sums import fold, parts_of, sum_dtype
from ..wire.work import Work
from ..world.info import group_ranks
from .blocks import UNKEPT, VARIABLE, allocate, attach, block_of
from .tasks import Meeting, Task

CHUNK = 2**18  # elements that are added up at a time: few enough to stay in a cache
_NOTHING = (0, -1, 0, UNKEPT)  # what a rank says that has no memory to share

# Takes what this rank shares and what everyone does, in the group's order; returns the result.
Act = Callable[[Tensor, list[Tensor]], Tensor]


class NodeMemory:
    """What a group's ranks, all on this host, need to work in one another's memory.

    Calls are asynchronous, and every rank makes the same ones in the same order. Tensors that
    `empty` returns travel as they are; others are copied there and back.

    Attributes:
        group: The ranks.
    """

    def __init__(self, group: ProcessGroup, processes: Sequence[int], tag: int) -> None:
        """Take what `joining.node_memory` has found out."""
        self.group = group
        self._processes = processes
        self._tag = tag
        self._tasks: deque[Task] = deque()  # whose part this rank has yet to do
        self._leaving: deque[Task] = deque()  # whose messages may still be under way
        self._next_slot = count()
        self._mapped: dict[tuple[int, int], tuple[int, Tensor]] = {}  # (rank, slot): number, bytes

    def slot(self) -> int:
        """Return a number for tensors of which each takes the place of the one before."""
        return next(self._next_slot)

    def empty(self, elements: int, dtype: torch.dtype, slot: int | None = None) -> Tensor:
        """Return a flat tensor of arbitrary values that other ranks can map.

        Args:
            elements: How many.
            dtype: Any.
            slot: Others keep their mapping of this rank's last tensor with this number; without
                one they map it anew each time, and its memory is free when this rank drops it.
        """
        try:
            kept = UNKEPT if slot is None else slot
            return allocate(elements, dtype, kept) if elements else torch.empty(0, dtype=dtype)
        except OSError:  # the call that is to share it tells every rank
            return torch.empty(elements, dtype=dtype)

    def forget(self) -> None:
        """Drop all mappings of others' tensors; nothing may be under way."""
        self._mapped.clear()

    def all_reduce(
        self, data: Tensor, counts: Sequence[int], *, mean: bool = False, start: Tensor | None
    ) -> Work[Tensor]:
        """Sum a flat tensor over the ranks, in rank order, in place.

        Args:
            data: As many elements on every rank; 16-bit floats are summed in float32.
            counts: Elements that each rank is to add up.
            mean: Divide by the number of ranks.
            start: What this rank's part of the sum begins with.

        Returns:
            The work; its `wait()` gives `data`.
        """
        own = parts_of(counts)[self.group.rank()]
        act = partial(self._sum_everywhere, own=own, mean=mean, start=start)
        return self._begin(data, act)

    def reduce_scatter(
        self, data: Tensor, counts: Sequence[int], *, mean: bool = False, start: Tensor | None
    ) -> Work[Tensor]:
        """Sum each rank's part of a flat tensor over the ranks, in rank order.

        Arguments as in `all_reduce`; `data` is left as it is.

        Returns:
            The work; its `wait()` gives this rank's part, new memory, 16-bit floats as float32.
        """
        own = parts_of(counts)[self.group.rank()]
        return self._begin(data, partial(self._sum_own, own=own, mean=mean, start=start))

    def all_gather(self, data: Tensor, counts: Sequence[int]) -> Work[Tensor]:
        """Fill a flat tensor, of which every rank has its own part, with the parts of all.

        Returns:
            The work; its `wait()` gives `data`.
        """
        return self._begin(data, partial(self._gather, parts=parts_of(counts)))

    def _begin(self, data: Tensor, act: Act) -> Work[Tensor]:
        """Share a tensor, and act on everybody's when all are ready.

        Args:
            data: This rank's.
            act: This rank's part.
        """
        if not data.numel():
            return Work((), lambda: data)
        self.advance()
        mine = self._placed(data)
        block = None if mine is None else block_of(mine)
        ready, done = Meeting(self.group, self._tag, 4), Meeting(self.group, self._tag + 1, 1)
        ready.say(_NOTHING if block is None else astuple(block))
        task = Task(ready, done, partial(self._act, act, mine))
        self._tasks.append(task)
        return Work((_Handle(self, task),), partial(_bring_home, task, mine, data))

    def advance(self, until: Task | None = None) -> None:
        """Do this rank's parts of tasks that all are ready for; wait for those up to `until`."""
        wait = until in self._tasks
        while self._tasks and self._tasks[0].advance(wait=wait):
            wait = wait and self._tasks[0] is not until
            self._leaving.append(self._tasks.popleft())
        while self._leaving and self._leaving[0].is_over():
            self._leaving.popleft().close()

    @torch.no_grad()
    def _act(
        self,
        act: Act,
        mine: Tensor | None,
        rows: Sequence[Sequence[int]],
    ) -> Tensor:
        """Map what all share and act on it.

        Raises:
            StateError: On every rank, if one has no memory for what it was to share.
        """
        without = [rank for rank, row in enumerate(rows) if row[1] < 0]
        if mine is None or without:
            ranks = group_ranks(self.group)
            raise StateError(
                f"{name_ranks([ranks[each] for each in without])} cannot get memory to share with "
                f"the other ranks of this host; set {VARIABLE}=0 to do without"
            )
        everyone = [
            mine if rank == self.group.rank() else self._map(rank, row, mine)
            for rank, row in enumerate(rows)
        ]
        return act(mine, everyone)

    def _sum_everywhere(
        self, data: Tensor, everyone: list[Tensor], own: range, mean: bool, start: Tensor | None
    ) -> Tensor:
        for at, total in _sums(everyone, own, start, mean):
            for each in everyone:
                each[at : at + len(total)] = total
        return data

    def _sum_own(
        self, data: Tensor, everyone: list[Tensor], own: range, mean: bool, start: Tensor | None
    ) -> Tensor:
        result = torch.empty(own.stop - own.start, dtype=sum_dtype(data.dtype))
        for at, total in _sums(everyone, own, start, mean):
            result[at - own.start : at - own.start + len(total)] = total
        return result

    def _gather(self, data: Tensor, everyone: list[Tensor], parts: Sequence[range]) -> Tensor:
        for each, part in zip(everyone, parts, strict=True):
            if each is not data:
                data[part.start : part.stop] = each[part.start : part.stop]
        return data

    def _placed(self, data: Tensor) -> Tensor | None:
        """Return a tensor that others can map, with these values; None if there is no memory."""
        if block_of(data) is not None:
            return data
        try:
            return allocate(data.numel(), data.dtype).copy_(data)
        except OSError:
            return None

    def _map(self, rank: int, row: Sequence[int], like: Tensor) -> Tensor:
        number, file, size, slot = row
        known = self._mapped.get((rank, slot))
        if known is None or known[0] != number or slot == UNKEPT:
            known = number, attach(self._processes[rank], file, size)
            if slot != UNKEPT:
                self._mapped[rank, slot] = known
        return known[1].view(like.dtype)[: like.numel()]


def _sums(
    everyone: Sequence[Tensor], part: range, start: Tensor | None, mean: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yield the sum of a part piece by piece, in rank order, and where each piece begins."""
    divisor = len(everyone) if mean else 1
    for at in part[::CHUNK]:
        stop = min(at + CHUNK, part.stop)
        first = None if start is None else start[at - part.start : stop - part.start]
        yield at, fold([each[at:stop] for each in everyone], start=first, divisor=divisor)


class _Handle:
    """A task as `Work` wants it."""

    def __init__(self, memory: NodeMemory, task: Task) -> None:
        self._memory, self._task = memory, task

    def wait(self) -> None:
        """Do this rank's part, and those of tasks before it."""
        self._memory.advance(self._task)

    def is_completed(self) -> bool:
        """Return whether all ranks have done theirs."""
        self._memory.advance()
        return self._task.is_over()


def _bring_home(task: Task, mine: Tensor | None, data: Tensor) -> Tensor:
    """Return the result of a task; in `data` if it is in what stood for it."""
    result = task.finish()
    return data.copy_(result) if result is mine and mine is not data else result
