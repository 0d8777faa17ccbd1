"""The runtime: executes one rank's program, whatever the schedule and the model are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ....dist import guard
from ....dist.errors import RankFaultError
from ..schedules.messages import Operation, Receive
from ..schedules.schedule import BACKWARD_WEIGHT, FORWARD, Action
from .faults import StageError, Watch
from .mail import Key, Mail, Message


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
    program: Sequence[Operation], stages: Sequence[int], num_stages: int, ahead: int
) -> list[Step]:
    """Part a rank's program before each of its actions.

    Args:
        program: As `derive_messages` gives it.
        stages: The rank's stages, chunk by chunk.
        num_stages: Of all ranks together.
        ahead: By how many actions receives begin earlier than there.
    """
    messages: list[list[Message]] = [[]]
    tasks: list[Task | None] = []
    for operation in program:
        if isinstance(operation, Action):
            tasks.append(task_of(operation, stages[operation.chunk], num_stages))
            messages.append([])
        else:
            receives = isinstance(operation, Receive)
            place = max(0, len(messages) - 1 - ahead) if receives else -1
            messages[place].append(Message(Key(*operation[1:]), operation.peer, receives))
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


def execute(steps: Sequence[Step], mail: Mail, run: Callable[[Task], None], watch: Watch) -> None:
    """Start each step's messages, wait for the input of its task, and run it.

    If anything raises on any rank, all ranks raise. The messages that are left still pass,
    without contents, so that no rank waits in vain and none is left over for the next step. If a
    guard is on, it tells all ranks instead, also those outside the pipeline that wait for these.

    Raises:
        StageError: Another rank has failed.
        RankFaultError: A guard has found a fault of another rank.
    """
    task: Task | None = None
    try:
        for messages, task in steps:
            if messages:
                mail.start(messages)
            if task is not None:
                if task.needs is not None:
                    mail.wait(task.needs)
                watch.look()
                run(task)
        mail.finish()  # in the try: a last message that fails fails the step too
    except RankFaultError:  # all ranks know it, and no message of theirs comes any more
        raise
    except Exception as error:
        if not isinstance(error, StageError) and guard.tell(error):
            raise
        text = None
        with suppress(Exception):  # what has happened first is raised, whatever else fails now
            text = _let_pass(steps, mail, watch, error, task)
        if text is not None and isinstance(error, StageError):
            raise StageError(text) from None
        raise
    # Every rank asks at the end of every step, also if all went well here: a rank whose part was
    # done early learns of the others' failures only so, and all of them raise in the same step.
    text = watch.settle(None)
    if text is not None:
        raise StageError(text)


def _let_pass(
    steps: Sequence[Step], mail: Mail, watch: Watch, error: Exception, task: Task | None
) -> str | None:
    """Let the messages that are left pass; return the message of the first rank that failed."""
    with suppress(Exception):  # the others wait for messages, whether they can be told or not
        where = "its last messages" if task is None else f"{task.action} of this step"
        watch.report(error, where)
    # Those that have begun are under way as they are; all later ones pass empty, in their order,
    # so that sends and receives still pair on both sides.
    mail.skip([message for step in steps for message in step.messages][mail.begun :])
    mail.finish()
    return watch.settle(error)
