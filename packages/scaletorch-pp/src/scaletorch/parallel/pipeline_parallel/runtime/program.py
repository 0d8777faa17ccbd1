"""One rank's program of a step: which messages begin, and which action runs then."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..schedules.builders import AnySchedule, built
from ..schedules.messages import Operation, Receive, program_of
from ..schedules.schedule import BACKWARD_WEIGHT, FORWARD, Action, Schedule
from ..schedules.simulate import proven
from .mail import Key, Message


class Task(NamedTuple):
    """An action as its rank runs it.

    Attributes:
        action: The action.
        stage: Its stage.
        needs: Key of the output of another stage's action that it needs; None if it needs none.
        makes: Key of its own output for another stage; None if there is no such stage.
    """

    action: Action
    stage: int
    needs: Key | None
    makes: Key | None


class Step(NamedTuple):
    """Messages that begin together, and then one task; none after the last messages."""

    messages: tuple[Message, ...]
    task: Task | None


def in_steps(
    program: Sequence[Operation],
    stages: Sequence[int],
    num_stages: int,
) -> list[Step]:
    """Split a rank's program before each of its actions.

    Args:
        program: As `derive_messages` gives it.
        stages: The rank's stages, chunk by chunk.
        num_stages: Of all ranks together.
    """
    messages: list[list[Message]] = [[]]
    tasks: list[Task | None] = []
    for operation in program:
        if isinstance(operation, Action):
            tasks.append(task_of(operation, stages[operation.chunk], num_stages))
            messages.append([])
        else:
            receives = isinstance(operation, Receive)
            messages[-1].append(Message(Key(*operation[1:]), operation.peer, receives))
    return [Step(tuple(m), task) for m, task in zip(messages, [*tasks, None], strict=True)]


def task_of(action: Action, stage: int, num_stages: int) -> Task:
    """Return an action with the keys of its input and its output."""
    kind, micro_batch, _ = action
    if kind == BACKWARD_WEIGHT:
        return Task(action, stage, None, None)
    gradient = kind != FORWARD
    before, own = stage + (1 if gradient else -1), Key(stage, micro_batch, gradient)
    needs = Key(before, micro_batch, gradient) if 0 <= before < num_stages else None
    ends = stage == (0 if gradient else num_stages - 1)
    return Task(action, stage, needs, None if ends else own)


class Plan(NamedTuple):
    """A schedule that was proven to run to its end, as one rank executes it.

    Attributes:
        schedule: The schedule.
        text: Tells it from others.
        steps: The rank's program.
    """

    schedule: Schedule
    text: str
    steps: list[Step]


@lru_cache(maxsize=64)
def plan_of(
    schedule: AnySchedule,
    num_ranks: int,
    num_micro_batches: int,
    rank: int,
) -> Plan:
    """Prove a schedule, and derive the program of one rank.

    Raises:
        ScheduleError: It would not run to its end, or not compute every gradient.
    """
    chosen = built(schedule, num_ranks, num_micro_batches)
    program = program_of(*proven(chosen), rank)
    digest = hashlib.blake2b(str(chosen).encode(), digest_size=8).hexdigest()
    steps = in_steps(program, chosen.stages[rank], chosen.num_stages)
    return Plan(chosen, f"schedule {chosen.name!r} ({digest})", steps)
