"""The runtime: executes one rank's program, whatever the schedule and the model are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..schedules.messages import Operation, Receive, Send
from ..schedules.schedule import Action
from .faults import StageError, Watch
from .mail import Mail


class Step(NamedTuple):
    """Messages that begin together, and then one action; none after the last messages."""

    messages: tuple[Send | Receive, ...]
    action: Action | None


def in_steps(program: Sequence[Operation], ahead: int) -> list[Step]:
    """Part a rank's program before each of its actions.

    Args:
        program: As `derive_messages` gives it.
        ahead: By how many actions receives begin earlier than there.
    """
    messages: list[list[Send | Receive]] = [[]]
    actions: list[Action | None] = []
    for operation in program:
        if isinstance(operation, Action):
            actions.append(operation)
            messages.append([])
        else:
            place = max(0, len(messages) - 1 - ahead) if isinstance(operation, Receive) else -1
            messages[place].append(operation)
    return [Step(tuple(m), a) for m, a in zip(messages, [*actions, None], strict=True)]


def execute(steps: Sequence[Step], mail: Mail, run: Callable[[Action], None], watch: Watch) -> None:
    """Start each step's messages and run its action.

    If anything raises on any rank, all ranks raise. What is left of the messages still passes,
    without contents, so that no rank waits in vain and none is left over for the next step.

    Raises:
        StageError: Another rank has failed.
    """
    action: Action | None = None
    try:
        for messages, action in steps:
            if messages:
                mail.start(messages)
            if action is not None:
                run(action)
        mail.finish()
    except Exception as error:
        text = None
        with suppress(Exception):  # what has happened first is raised, whatever else fails now
            text = _let_pass(steps, mail, watch, error, action)
        if text is not None and isinstance(error, StageError):
            raise StageError(text) from None
        raise
    text = watch.settle(None)
    if text is not None:
        raise StageError(text)


def _let_pass(
    steps: Sequence[Step], mail: Mail, watch: Watch, error: Exception, action: Action | None
) -> str | None:
    """Let what is left of a step's messages pass; return what the first that failed has said."""
    with suppress(Exception):  # the others wait for messages, whether they can be told or not
        watch.report(error, "its last messages" if action is None else f"{action} of this step")
    mail.skip([message for step in steps for message in step.messages][mail.begun :])
    mail.finish()
    return watch.settle(error)
