"""The times at which actions would run, the proof that all of them can, and what it costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, starmap
from typing import NamedTuple

from ....dist.errors import InvalidArgumentError
from .numbering import SPLIT, Numbered, ScheduleError, number
from .schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Schedule,
    Span,
    Timeline,
)

SHOWN = 4  # ranks of a cycle that a message names
# By how much an action changes the number of activations that its rank keeps.
KEPT = {FORWARD: 1, BACKWARD: -1, BACKWARD_INPUT: 0, BACKWARD_WEIGHT: -1}


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of actions and messages, in any one unit.

    Attributes:
        forward: Time of an F.
        backward: Time of a B.
        backward_input: Time of an I.
        backward_weight: Time of a W.
        message: Time from the end of an action until its output has reached another rank.
        stages: Factor of each stage on its actions' times; empty if all stages are equal.

    Raises:
        InvalidArgumentError: A time or a factor that is not finite, an action's time or a factor
            that is not positive, or a negative time of a message.
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
        peak_live: For each rank the most activations, of one stage and micro-batch each, that it
            keeps at a time for their backward; 0 in a schedule of forwards only.
        actions: The number of actions of each kind, all ranks together.
        messages: The number of messages from one rank to another.
    """

    peak_live: tuple[int, ...]
    actions: Mapping[str, int]
    messages: int


class Times(NamedTuple):
    """Start and end of each slot; -1 if nothing runs in it."""

    starts: list[float]
    ends: list[float]


def proven(schedule: Schedule) -> tuple[Numbered, Times]:
    """Return a schedule in numbers with its times at the default costs, if it runs to its end.

    `check` reports it and `derive_messages` derives the messages from it.

    Raises:
        ScheduleError: It is incomplete, out of order, or ranks wait for each other in a circle.
    """
    numbered = number(schedule)
    return numbered, run(numbered, Costs())


def check(schedule: Schedule) -> Report:
    """Prove that a schedule is complete, in order, and free of deadlock.

    Each micro-batch must have, on each stage, one forward and (unless no stage has a backward) one
    backward, or one of inputs and then one of weights; and no ranks may wait for each other in a
    circle. The messages that `derive_messages` adds keep this so.

    Raises:
        ScheduleError: It is not; the message says why, and on which rank.
    """
    numbered, _ = proven(schedule)
    kinds = [[kind for kind, _, _ in actions] for actions in schedule.ranks]
    peaks = (max(accumulate(map(KEPT.__getitem__, rank)), default=0) for rank in kinds)
    return Report(
        peak_live=(0,) * schedule.num_ranks if numbered.forward_only else tuple(peaks),
        actions=sum(map(Counter, kinds), Counter[str]()),
        messages=len(numbered.crossings) * schedule.num_micro_batches,
    )


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Predict when each action runs, each as soon as its rank is free and its inputs are there.

    Sending and receiving take no time of a rank: messages travel beside the computation.

    Args:
        schedule: The schedule.
        costs: Times of actions and messages; None takes a backward for twice a forward.

    Raises:
        ScheduleError: A schedule that `check` refuses.
        InvalidArgumentError: Factors for another number of stages.
    """
    numbered = number(schedule)
    times = run(numbered, costs or Costs())
    spans: list[Span] = []
    for rank, (actions, slots) in enumerate(zip(schedule.ranks, numbered.slots, strict=True)):
        starts, ends = (map(moments.__getitem__, slots) for moments in times)
        spans += starmap(Span, zip([rank] * len(slots), actions, starts, ends, strict=True))
    return Timeline(schedule, tuple(spans))


def rank_ends(schedule: Schedule, costs: Costs) -> list[float]:
    """Predict when each rank ends its last action: what `simulate` says, sooner.

    Raises:
        ScheduleError: A schedule that `check` refuses.
        InvalidArgumentError: Factors for another number of stages.
    """
    known = vars(schedule)  # a search simulates a schedule at many costs, and numbers it once
    numbered = known.get("numbered") or known.setdefault("numbered", number(schedule))
    ends = run(numbered, costs).ends
    return [ends[slots[-1]] for slots in numbered.slots]


def run(numbered: Numbered, costs: Costs) -> Times:
    """Return the times of a schedule: every rank runs its actions in order.

    Ranks are played one after another: a rank goes on until an input has not been made yet, and is
    played again once the action that makes it has run.

    Raises:
        ScheduleError: Ranks that wait for each other; it names them and their actions.
        InvalidArgumentError: Factors for another number of stages.
    """
    needs, delays = _inputs(numbered, costs.message)
    durations = _durations(numbered, costs)
    ends = [-1.0] * len(needs)  # below 0: not run yet
    ends[: numbered.schedule.num_micro_batches] = [0.0] * numbered.schedule.num_micro_batches
    starts = list(ends)
    reached = [0] * len(numbered.slots)
    free = [0.0] * len(numbered.slots)
    # The rank that waits for a slot: one at most, since each output is the input of one action.
    waiting: dict[int, int] = {}
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
            # In the order of a rank's actions its times never go back: each begins when the one
            # before has ended, or later, when its input is there.
            arrival += delays[slot]
            starts[slot] = now = arrival if arrival > now else now
            ends[slot] = now = now + durations[slot]
            if slot in waiting:
                ready.append(waiting.pop(slot))
        else:
            reached[rank] = len(slots)
        free[rank] = now
    if waiting:  # nobody can go on, and these have actions left: they wait for each other
        raise _deadlock(numbered, reached, {rank: need for need, rank in waiting.items()})
    return Times(starts, ends)


def _inputs(numbered: Numbered, message: float) -> tuple[list[int], list[float]]:
    """Return for each slot the slot whose output it needs, and the time that this travels."""
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


def _deadlock(numbered: Numbered, reached: list[int], needs: dict[int, int]) -> ScheduleError:
    """Return the error for a circle of ranks, each waiting for the next.

    Args:
        numbered: The schedule.
        reached: How far each rank has come.
        needs: The slot that each rank waits for.
    """
    schedule = numbered.schedule

    def owner(rank: int) -> int:
        return numbered.owners[needs[rank] // schedule.num_micro_batches]

    rank = next(r for r, place in enumerate(reached) if place < len(numbered.slots[r]))
    met: list[int] = []
    while rank not in met:
        met.append(rank)
        rank = owner(rank)
    circle = met[met.index(rank) :]
    links = []
    for each in circle[:SHOWN]:
        stage = numbered.stage(needs[each] // schedule.num_micro_batches)
        action = schedule.ranks[each][reached[each]]
        made = f"{numbered.name(needs[each])} of stage {stage}"
        links.append(f"waits at {action} for {made} on rank {owner(each)}")
    more = f", and so on, {len(circle)} ranks in a circle" if len(circle) > SHOWN else ""
    return ScheduleError(
        f"schedule {schedule.name!r} would never end: rank {rank} {', which '.join(links)}{more}"
    )
