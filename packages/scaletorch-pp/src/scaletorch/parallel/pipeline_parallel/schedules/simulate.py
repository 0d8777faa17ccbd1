"""Simulation of a schedule: when actions would run, proof that all do, and each rank's program."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from ....dist.errors import InvalidArgumentError
from .builders import AnySchedule, build_schedule
from .schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KINDS,
    Key,
    Schedule,
    ScheduleError,
    Span,
    Task,
    Tasks,
    Timeline,
    receiver,
    tasks_of,
)

SHOWN = 4  # at most this many ranks of a cycle are named in an error
# The change in the number of activations that a rank keeps, by kind of action.
KEPT = {FORWARD: 1, BACKWARD: -1, BACKWARD_INPUT: 0, BACKWARD_WEIGHT: -1}


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of actions and messages, in any common unit.

    Attributes:
        forward: Time of an F.
        backward: Time of a B.
        backward_input: Time of an I.
        backward_weight: Time of a W.
        message: Time from the end of an action until its output arrives on another rank.
        stages: For each stage, a factor on the times of its actions; empty if all are equal.

    Raises:
        InvalidArgumentError: A time or a factor is not finite, the time of an action or a factor is
            not positive, or the time of a message is negative.
    """

    forward: float = 1.0
    backward: float = 2.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    message: float = 0.0
    stages: Sequence[float] = ()

    def __post_init__(self) -> None:
        *actions, message, stages = astuple(self)
        positive = [*actions, *stages]
        if min(positive) <= 0 or message < 0 or not all(map(math.isfinite, [*positive, message])):
            raise InvalidArgumentError(
                "costs of actions and factors of stages must be positive, that of a message at "
                f"least 0, all finite, got {self}"
            )


@dataclass(frozen=True, slots=True)
class Report:
    """Memory, computations and messages of a schedule.

    Attributes:
        peak_live: For each rank, the peak number of activations kept for backwards, counted by
            stage and micro-batch; 0 in a schedule of forwards alone.
        actions: The number of actions of each kind over all ranks.
        messages: The number of messages between ranks.
    """

    peak_live: tuple[int, ...]
    actions: Mapping[str, int]
    messages: int


Times = list[list[tuple[float, float]]]  # start and end of each rank's actions, in order


def check(schedule: Schedule) -> Report:
    """Prove that a schedule is complete, in order, and free of deadlock.

    Each micro-batch must have, on each stage, one forward and (unless no stage has a backward) one
    backward "B", or one "I" and then one "W". No ranks may wait for each other in a circle. The
    messages that a train step adds cannot cause a deadlock.

    Raises:
        ScheduleError: The schedule is invalid; the message names the reason and the rank.
    """
    run(schedule, Costs())
    tasks = tasks_of(schedule)
    kinds = [[kind for kind, _, _ in actions] for actions in schedule.ranks]
    peaks = (max(accumulate(map(KEPT.__getitem__, rank)), default=0) for rank in kinds)
    actions = sum(map(Counter, kinds), Counter[str]())
    return Report(
        peak_live=(0,) * schedule.num_ranks if set(actions) == {FORWARD} else tuple(peaks),
        actions=actions,
        messages=sum(
            task.makes is not None and receiver(schedule, task.makes) != rank
            for rank, of_rank in enumerate(tasks)
            for task in of_rank
        ),
    )


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Predict when each action runs: as soon as its rank is free and its input has arrived.

    Sends and receives take none of a rank's time: they overlap with computation.

    Args:
        schedule: The schedule.
        costs: Times of actions and messages; None is `Costs()`: a backward takes twice a forward.

    Raises:
        ScheduleError: `check` refuses the schedule.
        InvalidArgumentError: The factors in `costs` are for another number of stages.
    """
    times = run(schedule, costs or Costs())
    spans = [
        Span(rank, action, *moments)
        for rank, actions in enumerate(schedule.ranks)
        for action, moments in zip(actions, times[rank], strict=True)
    ]
    return Timeline(schedule, tuple(spans))


def rank_ends(schedule: Schedule, costs: Costs) -> list[float]:
    """Predict when each rank ends its last action; the result of `simulate`, computed faster.

    Raises:
        ScheduleError: `check` refuses the schedule.
        InvalidArgumentError: The factors in `costs` are for another number of stages.
    """
    return [own[-1][1] for own in run(schedule, costs)]


def run(schedule: Schedule, costs: Costs) -> Times:
    """Return the times of a schedule: every rank runs its actions in order.

    Ranks are simulated in turn. A rank runs until it needs an input that is not made yet, and
    continues once the action that makes it has run.
    """
    tasks, homes = tasks_of(schedule), {s: rank for s, (rank, _) in schedule.places.items()}
    factors = costs.stages or [1.0] * len(homes)
    if len(factors) != len(homes):
        raise InvalidArgumentError(
            f"costs.stages must have a factor for each of {len(homes)} stages, got {len(factors)}"
        )
    by_kind = costs.forward, costs.backward, costs.backward_input, costs.backward_weight
    kinds = dict(zip(KINDS, by_kind, strict=True))
    durations = {(kind, s): time * f for kind, time in kinds.items() for s, f in enumerate(factors)}
    times: Times = [[] for _ in tasks]
    free = [0.0] * len(tasks)
    made: dict[Key, float] = {}
    # The rank that waits for each output: at most one, since an output is the input of one action.
    waiting: dict[Key, int] = {}
    ready = list(range(len(tasks)))
    while ready:
        rank = ready.pop()
        now, own, todo = free[rank], times[rank], tasks[rank]
        while len(own) < len(todo):
            (kind, _, _), stage, needs, makes = todo[len(own)]
            start = now
            if needs is not None:
                arrival = made.get(needs)
                if arrival is None:
                    waiting[needs] = rank
                    break
                if homes[needs[0]] != rank:
                    arrival += costs.message
                start = arrival if arrival > now else now
            now = start + durations[kind, stage]
            own.append((start, now))
            if makes is not None:
                made[makes] = now
                if makes in waiting:
                    ready.append(waiting.pop(makes))
        free[rank] = now
    if waiting:  # no rank can continue, and these have actions left: they wait for each other
        needed = {rank: key for key, rank in waiting.items()}
        raise _deadlock(schedule, tasks, [*map(len, times)], needed)
    return times


def _deadlock(
    schedule: Schedule, tasks: Tasks, reached: list[int], needs: dict[int, Key]
) -> ScheduleError:
    """Return the error for a circle of ranks, each waiting for the next."""
    rank = min(needs)
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank, _ = schedule.places[needs[rank].stage]
    circle = path[path.index(rank) :]
    links = []
    for waiting in circle[:SHOWN]:
        owner, _ = schedule.places[needs[waiting].stage]
        kind, m, _ = next(task.action for task in tasks[owner] if task.makes == needs[waiting])
        output = f"{kind}{m} of stage {needs[waiting].stage} on rank {owner}"
        links.append(f"waits at {schedule.ranks[waiting][reached[waiting]]} for {output}")
    more = f", and so on, {len(circle)} ranks in a circle" if len(circle) > SHOWN else ""
    return ScheduleError(
        f"schedule {schedule.name!r} would never end: rank {rank} {', which '.join(links)}{more}"
    )


class Message(NamedTuple):
    """A message between two ranks, as one of them sees it."""

    peer: int  # the other rank
    key: Key  # of the content, the same on both sides

    def __str__(self) -> str:
        """Return text such as `send F3 of stage 0 to rank 1`; a gradient is `B3`."""
        verb, to = ("receive", "from") if isinstance(self, Receive) else ("send", "to")
        stage, micro_batch, gradient = self.key
        content = f"{'B' if gradient else 'F'}{micro_batch} of stage {stage}"
        return f"{verb} {content} {to} rank {self.peer}"


class Send(Message):
    """A message that carries the output of one of this rank's actions to its peer."""

    __slots__ = ()


class Receive(Message):
    """The same message as the rank at its other end sees it."""

    __slots__ = ()


Program = Sequence[Task | Message]

AHEAD = 4  # tasks by which a receive may start early; each is one more buffer


class Plan(NamedTuple):
    """A schedule that was proven to run to its end, with one rank's program."""

    schedule: Schedule
    text: str  # name and digest of the schedule, to compare it between ranks
    program: Program  # the rank's tasks and messages, in order
    early: Program  # the same with receives that start early


@lru_cache(maxsize=64)
def plan_of(schedule: AnySchedule, num_ranks: int, num_micro_batches: int, rank: int) -> Plan:
    """Prove a schedule, and derive the program of one rank."""
    chosen = build_schedule(schedule, num_ranks, num_micro_batches)
    digest = hashlib.blake2b(str(chosen).encode(), digest_size=8).hexdigest()
    program = program_of(chosen, tasks_of(chosen), run(chosen, Costs()), rank)
    text = f"schedule {chosen.name!r} ({digest})"
    return Plan(chosen, text, program, receive_early(program))


def program_of(schedule: Schedule, tasks: Tasks, times: Times, rank: int) -> Program:
    """Return one rank's program of a proven schedule: its tasks and messages, in order.

    An output is sent after the action that made it and before the next action. By the times of
    `simulate`, it is received when the receiver waits for it or has just ended an action. Nothing
    is sent between two stages of one rank.
    """
    # All actions and messages of all ranks have one global order: an action stands at its start, a
    # message at the end of the action that made it, before actions that start at that time.
    # Messages of the same time are ordered by stage and micro-batch, forwards first. Each program
    # is the subsequence of this order that belongs to its rank.
    # So ranks cannot deadlock, even if a send blocks until its receive. Proof: take the first
    # action or message in the order that has not run. Everything before it on its ranks has run, so
    # an action has its inputs, and both sides of a message have reached it. Adjacent messages may
    # also be posted as a batch: the first message still has both sides posted, so a batch completes
    # after finitely many steps. Two ranks see the messages between them in the same order, so their
    # sends and receives match.
    events: list[tuple[float, bool, tuple[int, ...], Task | Message]] = []
    for source, own in enumerate(tasks):
        for place, (task, (start, end)) in enumerate(zip(own, times[source], strict=True)):
            if source == rank:
                events.append((start, True, (place,), task))
            if task.makes is None:
                continue
            stage, micro_batch, gradient = task.makes
            target = receiver(schedule, task.makes)
            if target != source and rank in (source, target):
                order = (gradient, -stage if gradient else stage, micro_batch)
                send, peer = (Send, target) if rank == source else (Receive, source)
                events.append((end, False, order, send(peer, task.makes)))
    return [operation for *_, operation in sorted(events, key=itemgetter(0, 1, 2))]


def receive_early(program: Program) -> Program:
    """Start each receive `AHEAD` tasks earlier, so that its message travels during these tasks.

    Tasks and sends keep their order, and so do receives: messages between two ranks still match.
    """
    places: list[tuple[int, bool]] = []
    tasks = 0  # so far
    for operation in program:
        is_task = isinstance(operation, Task)
        places.append((tasks - AHEAD * isinstance(operation, Receive), is_task))
        tasks += is_task
    return [program[index] for index in sorted(range(len(program)), key=places.__getitem__)]
