"""Messages between stages that a rank holds at the moments at which it keeps the most.

As the pipeline's runtime has them on the CPU: a rank begins to receive `AHEAD` actions early, and
holds the latest `IN_FLIGHT` of what it has sent. Outputs that are kept until their backward are no
part of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ...parallel.pg_manager import Grid
from ...parallel.pipeline_parallel import Action, Receive, Send, derive_messages
from ...parallel.pipeline_parallel.building import AHEAD, IN_FLIGHT
from ..layout import Layout
from .live import ROUNDS, SPLIT
from .stages import schedule_of

LONG = 16  # ranks of a pipeline with ends and a middle

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
    found = _under_way(layout.schedule, pp, layout.chunks, followed(layout))
    half = pp // 2
    return (*found[:half], *found[half : half + 1] * (layout.grid.pp - pp), *found[half:])


def followed(layout: Layout) -> int:
    """Return how many micro-batches are followed."""
    pp = min(layout.grid.pp, LONG)
    enough = pp + 2 * IN_FLIGHT
    if layout.schedule in SPLIT:
        enough += pp
    if layout.schedule == "interleaved_1f1b":
        enough = (ROUNDS + layout.chunks) * pp
    return min(layout.micro_batches, enough)


_Ways = tuple[tuple[UnderWay, ...], UnderWay]


@lru_cache(maxsize=4096)
def _under_way(schedule: str, pp: int, chunks: int, count: int) -> tuple[_Ways, ...]:
    layout = Layout(Grid(pp=pp), schedule=schedule, chunks=chunks, micro_batches=count)
    built = schedule_of(layout)
    found = zip(derive_messages(built), built.stages, strict=True)
    return tuple(_of_rank(program, stages) for program, stages in found)


def _of_rank(program: Sequence[Action | Message], stages: Sequence[int]) -> _Ways:
    most: dict[tuple[str, int], int] = {}
    chosen: dict[tuple[str, int], list[Message]] = {}
    for action, live, held in moments_of(program, stages):
        key, before = (action.kind, action.chunk), most.get((action.kind, action.chunk), -1)
        if live >= before:
            found = held()
            if live > before or len(found) > len(chosen[key]):
                most[key], chosen[key] = live, found
    ways = tuple([UnderWay(*key, *counted(messages, stages)) for key, messages in chosen.items()])
    last = UnderWay(action.kind, action.chunk, *counted(held(), stages))
    own = tuple(n + (at == action.chunk) for at, n in enumerate(last.returning))  # gone by now
    return ways, last._replace(returning=own)


def counted(messages: Sequence[Message], stages: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield how many messages there are by chunk, as the four counts of `UnderWay`."""
    each = [[0] * len(stages) for _ in range(4)]
    for message in messages:  # a search spends much of its time here
        sort = 2 * isinstance(message, Receive) + message.gradient
        each[sort][stages.index(_own(message))] += 1
    yield from map(tuple, each)


def _own(message: Message) -> int:
    """Return the stage of this rank that makes or takes a message."""
    if isinstance(message, Send):
        return message.stage
    return message.stage + (-1 if message.gradient else 1)


def moments_of(
    program: Sequence[Action | Message], stages: Sequence[int]
) -> Iterator[tuple[Action, int, Callable[[], list[Message]]]]:
    """Yield each action, how many micro-batches are kept then, halves too, and the messages."""

    def held() -> list[Message]:
        here = [m for m in sent if m.gradient or (m.stage, m.micro_batch) not in live]
        return [*here, *come.values()]

    sent: deque[Message] = deque(maxlen=IN_FLIGHT)
    come: dict[tuple[int, int, bool], Message] = {}
    live: set[tuple[int, int]] = set()
    halves = 0
    for messages, action in _steps(program):
        for each in messages:
            if isinstance(each, Send):
                sent.append(each)
            else:
                come[_own(each), each.micro_batch, each.gradient] = each
        here = stages[action.chunk], action.micro_batch
        if action.kind == "F":
            come.pop((*here, False), None)
            live.add(here)
            yield action, len(live) + halves, held
            continue
        yield action, len(live) + halves, held
        come.pop((*here, True), None)
        live.discard(here)
        halves += {"I": 1, "W": -1}.get(action.kind, 0)


def _steps(program: Sequence[Action | Message]) -> Iterator[tuple[list[Message], Action]]:
    """Yield each action and the messages that begin before it, receives some actions early."""
    begin: list[list[Message]] = [[]]
    actions: list[Action] = []
    for each in program:
        if isinstance(each, Action):
            actions.append(each)
            begin.append([])
        else:
            early = AHEAD if isinstance(each, Receive) else 0
            begin[max(0, len(actions) - early)].append(each)
    yield from zip(begin, actions, strict=False)
