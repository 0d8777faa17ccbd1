"""Simulation of a schedule: when actions would run, proof that all do, peak memory and messages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate

from ....dist.errors import InvalidArgumentError
from .schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KINDS,
    Schedule,
    Span,
    Timeline,
)
from .tasks import Key, ScheduleError, Tasks, receiver, tasks_of

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


def prove(schedule: Schedule) -> tuple[Tasks, Times]:
    """Prove that a schedule runs to its end; return its tasks and their times at default costs."""
    return tasks_of(schedule), run(schedule, Costs())


def check(schedule: Schedule) -> Report:
    """Prove that a schedule is complete, in order, and free of deadlock.

    Each micro-batch must have, on each stage, one forward and (unless no stage has a backward) one
    backward "B", or one "I" and then one "W". No ranks may wait for each other in a circle. The
    messages that a train step adds cannot cause a deadlock.

    Raises:
        ScheduleError: The schedule is invalid; the message names the reason and the rank.
    """
    tasks, _ = prove(schedule)
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
