"""Schedules as data: the ordered actions and the stages of each rank, tasks, and timelines.

A schedule lists each rank's computations in order; inputs, outputs and messages are derived from
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from ....dist.errors import InvalidArgumentError

FORWARD = "F"
BACKWARD = "B"  # gradients of both inputs and weights
BACKWARD_INPUT = "I"
BACKWARD_WEIGHT = "W"
KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


class Action(NamedTuple):
    """One computation of a rank.

    Attributes:
        kind: "F" forward, "B" backward, or the two halves of a backward, "I" for the gradient of
            the inputs and "W" for the gradients of the weights.
        micro_batch: Its micro-batch, from 0.
        chunk: The index of its stage among the rank's stages, from 0.
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        """Return text such as `F3`, or `F3.1` for the second chunk."""
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind}{self.micro_batch}{chunk}"


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank of a pipeline in one step, in order.

    Attributes:
        name: Its name.
        num_micro_batches: Number of micro-batches of the step.
        stages: Each rank's stages, chunk by chunk.
        ranks: Each rank's actions.
    """

    name: str
    num_micro_batches: int
    stages: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """The number of stages over all ranks."""
        return sum(map(len, self.stages))

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """The rank and the chunk of each stage."""
        return {
            stage: (rank, chunk)
            for rank, stages in enumerate(self.stages)
            for chunk, stage in enumerate(stages)
        }

    def __str__(self) -> str:
        """Return one line for each rank."""
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)


class Span(NamedTuple):
    """The start and end of one action on its rank, in the timeline's unit."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All actions of a step with their times, predicted or measured.

    Attributes:
        schedule: The schedule that ran.
        spans: The times of its actions, in order for each rank.
        unit: Name of the unit of time, for pictures.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    unit: str = ""

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        return max(s.end for s in self.spans) - min(s.start for s in self.spans)

    @property
    def bubble(self) -> float:
        """The idle fraction of all ranks' time, 0 to 1."""
        busy = sum(s.end - s.start for s in self.spans)
        return 1 - busy / (self.makespan * self.schedule.num_ranks)


# The kinds that may come next on a stage, after these kinds for the same micro-batch.
_NEXT = {"": FORWARD, FORWARD: BACKWARD + BACKWARD_INPUT, FORWARD + BACKWARD_INPUT: BACKWARD_WEIGHT}
_Done = dict[tuple[int, int], str]  # the kinds of actions in order, by chunk and micro-batch


class ScheduleError(InvalidArgumentError):
    """A schedule that cannot run, or misses gradients; the message names the rank and action."""


class Key(NamedTuple):
    """The key of an output: the stage that made it, its micro-batch, whether it is a gradient."""

    stage: int
    micro_batch: int
    gradient: bool


class Task(NamedTuple):
    """An action with its input and output."""

    action: Action
    stage: int
    needs: Key | None  # the input from another stage; None if it needs none
    makes: Key | None  # the output for another stage; None if no stage needs it

    def __str__(self) -> str:
        """Return the action as text."""
        return str(self.action)


Tasks = list[list[Task]]  # each rank's, in order


def receiver(schedule: Schedule, key: Key) -> int:
    """Return the rank that needs an output."""
    rank, _ = schedule.places[key.stage - 1 if key.gradient else key.stage + 1]
    return rank


def tasks_of(schedule: Schedule) -> Tasks:
    """Return the tasks of a schedule, after checking all but deadlocks (`ScheduleError`)."""
    known = vars(schedule)  # a cache, since a search simulates a schedule at many costs
    tasks: Tasks | None = known.get("tasks")
    if tasks is None:
        _require_stages(schedule)
        done = [_done(schedule, rank) for rank in range(schedule.num_ranks)]
        _require_all(schedule, done)
        count = schedule.num_stages
        known["tasks"] = tasks = [
            [_task(action, stages[action.chunk], count) for action in actions]
            for stages, actions in zip(schedule.stages, schedule.ranks, strict=True)
        ]
    return tasks


def _task(action: Action, stage: int, num_stages: int) -> Task:
    kind, micro_batch, _ = action
    if kind == BACKWARD_WEIGHT:
        return Task(action, stage, None, None)
    gradient = kind != FORWARD
    before, own = stage + (1 if gradient else -1), Key(stage, micro_batch, gradient)
    needs = Key(before, micro_batch, gradient) if 0 <= before < num_stages else None
    ends = stage == (0 if gradient else num_stages - 1)
    return Task(action, stage, needs, None if ends else own)


def _require_stages(schedule: Schedule) -> None:
    stages = sorted(chain.from_iterable(schedule.stages))
    problem = ""
    if schedule.num_micro_batches < 1:
        problem = f"expected at least 1 micro-batch, got {schedule.num_micro_batches}"
    elif len(schedule.stages) != len(schedule.ranks):
        problem = f"got stages of {len(schedule.stages)} ranks, actions of {len(schedule.ranks)}"
    elif not stages or stages != list(range(len(stages))):
        problem = f"each of the stages 0, 1, 2, ... must be on exactly one rank, got {stages}"
    if problem:
        raise ScheduleError(f"schedule {schedule.name!r}: {problem}")


def _done(schedule: Schedule, rank: int) -> _Done:
    """Return a rank's actions, after checking each action and its order."""
    chunks, done = len(schedule.stages[rank]), _Done()
    for place, action in enumerate(schedule.ranks[rank]):
        kind, micro_batch, chunk = action
        before = done.get((chunk, micro_batch), "")
        reason = ""
        known = 0 <= chunk < chunks and 0 <= micro_batch < schedule.num_micro_batches
        if kind not in KINDS or not known:
            reason = f"kinds are {', '.join(KINDS)}, micro-batches are 0 to "
            reason += f"{schedule.num_micro_batches - 1}, and this rank's chunks 0 to {chunks - 1}"
        elif kind not in _NEXT.get(before, ""):
            reason = f"before it the stage has {' and '.join(before) or 'no action'} of its "
            reason += "micro-batch; the order is one F, then one B, or one I and later one W"
        if reason:
            where = f"rank {rank}, action {place} ({action})"
            raise ScheduleError(f"schedule {schedule.name!r}: {where}: {reason}")
        done[chunk, micro_batch] = before + kind
    return done


def _require_all(schedule: Schedule, done: list[_Done]) -> None:
    trains = any(len(kinds) > 1 for own in done for kinds in own.values())
    missing = {
        "": "F{} of stage {} is missing",
        FORWARD: "B{} of stage {} is missing (or I and W)" if trains else "",
        FORWARD + BACKWARD_INPUT: "W{} of stage {} is missing; its weight gradients would be lost",
    }
    for stage, (rank, chunk) in sorted(schedule.places.items()):
        for m in range(schedule.num_micro_batches):
            text = missing.get(done[rank].get((chunk, m), ""))
            if text:
                text = text.format(m, stage)
                raise ScheduleError(f"schedule {schedule.name!r}: rank {rank}: {text}")
