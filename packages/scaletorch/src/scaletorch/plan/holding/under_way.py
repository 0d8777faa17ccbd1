"""Messages between stages that a rank holds at the moments at which it keeps the most.

As the pipeline's runtime has them on the CPU: a rank holds the latest `IN_FLIGHT` of what it has
sent. Outputs that are kept until their backward are no part of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ...parallel.pg_manager import Grid
from ...parallel.pipeline_parallel import Action, Receive, Send, derive_messages
from ...parallel.pipeline_parallel.building import IN_FLIGHT
from ..layout import Layout
from .repeating import LONG, followed
from .stages import schedule_of

Message = Send | Receive


class UnderWay(NamedTuple):
    """How many messages of a rank while an action runs and it keeps the most, by chunk.

    Attributes:
        kind: Of the action.
        chunk: Of the action.
        forward: Hidden states that it has sent, and whose backward is over.
        backward: Gradients that it has sent.
        entering: Hidden states that have come, or are to come, for later forwards.
        returning: Gradients that have come, or are to come, for this backward and later ones.
    """

    kind: str
    chunk: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    entering: tuple[int, ...]
    returning: tuple[int, ...]


def under_way(layout: Layout) -> tuple[tuple[UnderWay, ...], ...]:
    """Return for each rank of the pipeline the messages that it holds when it keeps the most.

    For each kind and chunk of actions. Of several such moments it is the one with the most
    messages. No more micro-batches are followed than it takes until all repeats itself, and no more
    ranks than `LONG`: those in the middle hold the same.
    """
    return tuple([ways for ways, _ in _of_all(layout)])


def at_last(layout: Layout) -> tuple[UnderWay, ...]:
    """Return for each rank of the pipeline the messages that it holds in its last backward.

    No other micro-batch is under way then.
    """
    return tuple([last for _, last in _of_all(layout)])


def _of_all(layout: Layout) -> tuple[_Ways, ...]:
    pp = min(layout.grid.pp, LONG)
    count = followed(layout.schedule, pp, layout.micro_batches)
    found = _under_way(layout.schedule, pp, layout.chunks, count)
    half = pp // 2
    return (*found[:half], *found[half : half + 1] * (layout.grid.pp - pp), *found[half:])


_Ways = tuple[tuple[UnderWay, ...], UnderWay]


@lru_cache(maxsize=4096)
def _under_way(schedule: str, pp: int, chunks: int, count: int) -> tuple[_Ways, ...]:
    layout = Layout(Grid(pp=pp), schedule=schedule, chunks=chunks, micro_batches=count)
    built = schedule_of(layout)
    found = zip(derive_messages(built), built.stages, strict=True)
    return tuple(_of_rank(program, stages) for program, stages in found)


def _of_rank(program: Sequence[Action | Message], stages: Sequence[int]) -> _Ways:
    most: dict[tuple[str, int], tuple[int, int]] = {}
    ways: dict[tuple[str, int], UnderWay] = {}
    for action, live, held in moments_of(program, stages):
        key = action.kind, action.chunk
        if (live, held.total) > most.get(key, (-1, -1)):
            most[key], ways[key] = (live, held.total), UnderWay(*key, *held.by_chunk())
    last = UnderWay(action.kind, action.chunk, *held.by_chunk())
    own = tuple(n + (at == action.chunk) for at, n in enumerate(last.returning))  # gone by now
    return tuple(ways.values()), last._replace(returning=own)


class Held:
    """How many messages a rank has, as its actions run.

    Attributes:
        total: Of all.
        each: By chunk, of the four sorts of `UnderWay`.
    """

    __slots__ = "each", "total"

    def __init__(self, chunks: int) -> None:
        self.total, self.each = 0, [[0] * chunks for _ in range(4)]

    def add(self, sort: int, chunk: int, number: int) -> None:
        """Have so many more of a sort."""
        self.each[sort][chunk] += number
        self.total += number

    def by_chunk(self) -> Iterator[tuple[int, ...]]:
        """Yield how many there are now, as the four counts of `UnderWay`."""
        return map(tuple, self.each)


FORWARD, BACKWARD, ENTERING, RETURNING = range(4)
_Key = tuple[int, int, bool]  # chunk and micro-batch, and whether it is a gradient


def moments_of(
    program: Sequence[Action | Message], stages: Sequence[int]
) -> Iterator[tuple[Action, int, Held]]:
    """Yield each action, how many micro-batches are kept then, halves too, and the messages."""
    chunk_of = {stage: chunk for chunk, stage in enumerate(stages)}
    held = Held(len(stages))
    sent: deque[_Key] = deque()
    come: set[_Key] = set()
    live: set[tuple[int, int]] = set()  # whose outputs stay until their backward, sent or not
    halves = 0
    for messages, action in _steps(program):
        for each in messages:
            if isinstance(each, Send):
                sent.append((chunk_of[each.stage], each.micro_batch, each.gradient))
                _count(held, sent[-1], live, 1)
                if len(sent) > IN_FLIGHT:
                    _count(held, sent.popleft(), live, -1)
            else:
                chunk = chunk_of[each.stage + (-1 if each.gradient else 1)]
                come.add((chunk, each.micro_batch, each.gradient))
                held.add(RETURNING if each.gradient else ENTERING, chunk, 1)
        chunk, number = here = action.chunk, action.micro_batch
        if action.kind == "F":
            _take(held, come, (chunk, number, False))
            live.add(here)
            yield action, len(live) + halves, held
            continue
        yield action, len(live) + halves, held
        _take(held, come, (chunk, number, True))
        if here in live:
            live.remove(here)
            if (chunk, number, False) in sent:
                held.add(FORWARD, chunk, 1)
        halves += {"I": 1, "W": -1}.get(action.kind, 0)


def _count(held: Held, sent: _Key, live: set[tuple[int, int]], number: int) -> None:
    chunk, micro_batch, gradient = sent
    if gradient:
        held.add(BACKWARD, chunk, number)
    elif (chunk, micro_batch) not in live:
        held.add(FORWARD, chunk, number)


def _take(held: Held, come: set[_Key], key: _Key) -> None:
    if key in come:
        come.remove(key)
        held.add(RETURNING if key[2] else ENTERING, key[0], -1)


def _steps(program: Sequence[Action | Message]) -> Iterator[tuple[list[Message], Action]]:
    """Yield each action and the messages that begin before it."""
    begin: list[list[Message]] = [[]]
    actions: list[Action] = []
    for each in program:
        if isinstance(each, Action):
            actions.append(each)
            begin.append([])
        else:
            begin[len(actions)].append(each)
    yield from zip(begin, actions, strict=False)
