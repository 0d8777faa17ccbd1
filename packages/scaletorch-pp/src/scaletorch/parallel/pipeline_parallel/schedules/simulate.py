"""When every action would run, and whether all of them can."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from itertools import starmap

from ....dist.errors import InvalidArgumentError
from .numbering import SPLIT, Numbered, ScheduleError, number
from .schedule import Schedule
from .timeline import Span, Timeline

SHOWN = 4  # ranks of a cycle that a message names


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of actions and messages, in any one unit.

    Attributes:
        forward: Of F.
        backward: Of B.
        backward_input: Of I.
        backward_weight: Of W.
        message: From the end of an action until its output has reached another rank.
        stages: Factor of each stage on its actions' times; none for equal stages.

    Raises:
        InvalidArgumentError: An action's time or a factor that is not positive, a message's that
            is negative, or one that is not finite.
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
class Times:
    """Start and end by slot; -1 where nothing runs."""

    starts: list[float]
    ends: list[float]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Predict when each action runs, each as soon as its rank is free and its inputs are there.

    Sending and receiving take no time of a rank: messages travel beside the computation.

    Args:
        schedule: What to run.
        costs: Times of actions and messages; a backward twice a forward where not given.

    Raises:
        ScheduleError: A schedule that `check` refuses.
        InvalidArgumentError: Factors for another number of stages.
    """
    numbered = number(schedule)
    times = run(numbered, costs or Costs())
    spans: list[Span] = []
    for rank, (actions, slots) in enumerate(zip(schedule.ranks, numbered.slots, strict=True)):
        starts, ends = map(times.starts.__getitem__, slots), map(times.ends.__getitem__, slots)
        spans += starmap(Span, zip([rank] * len(slots), actions, starts, ends, strict=True))
    return Timeline(schedule, tuple(spans))


def run(numbered: Numbered, costs: Costs) -> Times:
    """Run every rank's actions in order, a rank at a time until it lacks an input.

    Raises:
        ScheduleError: Ranks that wait for each other; it names them and their actions.
        InvalidArgumentError: Factors for another number of stages.
    """
    needs, delays = _inputs(numbered, costs.message)
    durations = _durations(numbered, costs)
    ends = [-1.0] * len(needs)
    ends[: numbered.schedule.num_micro_batches] = [0.0] * numbered.schedule.num_micro_batches
    starts = list(ends)
    reached = [0] * len(numbered.slots)
    free = [0.0] * len(numbered.slots)
    waiting: dict[int, int] = {}  # who needs the output of a slot
    ready = list(range(len(numbered.slots)))
    while ready:
        rank = ready.pop()
        now = free[rank]
        slots = numbered.slots[rank]
        for place in range(reached[rank], len(slots)):
            slot = slots[place]
            arrival = ends[needs[slot]]
            if arrival < 0:
                waiting[needs[slot]] = rank
                reached[rank] = place
                break
            arrival += delays[slot]
            starts[slot] = now = arrival if arrival > now else now
            ends[slot] = now = now + durations[slot]
            if slot in waiting:
                ready.append(waiting.pop(slot))
        else:
            reached[rank] = len(slots)
        free[rank] = now
    if waiting:
        raise _deadlock(numbered, reached)
    return Times(starts, ends)


def _inputs(numbered: Numbered, message: float) -> tuple[list[int], list[float]]:
    """Return for each slot the one whose output it needs, and how long that travels."""
    size, blocks = numbered.schedule.num_micro_batches, 2 * numbered.schedule.num_stages
    weights = blocks // 2 * size
    # Forwards of stage 0 need data. So do, here, weight backwards: their order is known to hold.
    needs = [*range(size), *range(blocks * size), *([0] * weights)]
    delays = [0.0] * len(needs)
    for block in numbered.crossings:
        delays[(block + 1) * size : (block + 2) * size] = [message] * size
    return needs, delays


def _durations(numbered: Numbered, costs: Costs) -> list[float]:
    size, num_stages = numbered.schedule.num_micro_batches, numbered.schedule.num_stages
    factors = list(costs.stages or [1.0] * num_stages)
    if len(factors) != num_stages:
        raise InvalidArgumentError(
            f"costs.stages must have a factor for each of {num_stages} stages, got {len(factors)}"
        )
    durations = [0.0] * size
    for factor in factors:
        durations += [costs.forward * factor] * size
    for block, factor in enumerate(reversed(factors), num_stages + 1):
        whole, split = costs.backward * factor, costs.backward_input * factor
        filled = numbered.filled[block * size : (block + 1) * size]
        durations += [split if how == SPLIT else whole for how in filled]
    for factor in factors:
        durations += [costs.backward_weight * factor] * size
    return durations


def _deadlock(numbered: Numbered, reached: list[int]) -> ScheduleError:
    size = numbered.schedule.num_micro_batches

    def wait(rank: int) -> tuple[str, int]:
        place = reached[rank]
        need = numbered.slots[rank][place] - size
        made = f"{numbered.name(need)} of stage {numbered.stage(need // size)}"
        action = numbered.schedule.ranks[rank][place]
        return f"waits at {action} for {made} on", numbered.owners[need // size]

    stuck = next(r for r, place in enumerate(reached) if place < len(numbered.slots[r]))
    return deadlock(numbered.schedule, stuck, wait)


def deadlock(
    schedule: Schedule, rank: int, wait: Callable[[int], tuple[str, int]]
) -> ScheduleError:
    """Return the error for a circle of ranks, each waiting for the next.

    Args:
        schedule: For its name.
        rank: One that waits for ever.
        wait: What such a rank waits for, as "waits at B0 for B0 of stage 1 on", and on which rank.
    """
    met: list[int] = []
    while rank not in met:
        met.append(rank)
        rank = wait(rank)[1]
    circle = met[met.index(rank) :]
    links = [f"{text} rank {other}" for text, other in map(wait, circle[:SHOWN])]
    more = f", and so on, {len(circle)} ranks in a circle" if len(circle) > SHOWN else ""
    return ScheduleError(
        f"schedule {schedule.name!r} would never end: rank {rank} {', which '.join(links)}{more}"
    )
