"""A rank's program of a step, executed: whatever the schedule and the model are.

If a stage raises in the middle of a step, every rank of the pipeline learns why at the end of the
step: until then each makes the calls that all make, since the ranks of one stage may meet inside it
(tensor parallelism, experts).
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from ....dist import all_gather, all_gather_object
from ....dist.building import tell_guard
from ....dist.errors import RankFaultError
from ...pg_manager import describe_rank
from ..schedules.builders import AnySchedule, built
from ..schedules.messages import Message, program_of
from ..schedules.schedule import Schedule
from ..schedules.simulate import proven
from ..schedules.tasks import Task
from .mail import Mail, StageError

Program = Sequence[Task | Message]


class Plan(NamedTuple):
    """A schedule that was proven to run to its end, as one rank executes it.

    Attributes:
        schedule: The schedule.
        text: Tells it from others.
        program: The rank's tasks and messages, in order.
    """

    schedule: Schedule
    text: str
    program: Program


@lru_cache(maxsize=64)
def plan_of(schedule: AnySchedule, num_ranks: int, num_micro_batches: int, rank: int) -> Plan:
    """Prove a schedule, and derive the program of one rank.

    Raises:
        ScheduleError: It would not run to its end, or not compute every gradient.
    """
    chosen = built(schedule, num_ranks, num_micro_batches)
    digest = hashlib.blake2b(str(chosen).encode(), digest_size=8).hexdigest()
    program = program_of(chosen, *proven(chosen), rank)
    return Plan(chosen, f"schedule {chosen.name!r} ({digest})", program)


def execute(
    program: Program,
    mail: Mail,
    run: Callable[[Task], None],
    group: ProcessGroup | None,
    note: Callable[[], bool],
) -> bool:
    """Start messages, wait for the input of each task, and run it.

    If anything raises on any rank, all ranks raise. The messages that are left still pass,
    without contents, so that no rank waits in vain and none is left over for the next step. If a
    guard is on, it tells all ranks instead, also those outside the pipeline that wait for these.

    Args:
        program: This rank's.
        mail: The outputs on their way.
        run: Runs a task whose input is there.
        group: The pipeline; None in one process.
        note: What this rank tells the others at the end.

    Returns:
        Whether `note` returned true on any rank.

    Raises:
        StageError: Another rank has failed.
        RankFaultError: A guard has found a fault of another rank.
    """
    rest = deque(program)
    try:
        while rest:
            each = rest[0]
            if isinstance(each, Message):
                mail.start(each)
            else:
                mail.flush()
                if each.needs is not None:
                    mail.wait(each.needs)
                run(each)
            rest.popleft()
        mail.finish()  # in the try: a last message that fails fails the step too
    except RankFaultError:  # all ranks know it, and no message of theirs comes any more
        raise
    except Exception as error:
        if isinstance(error, StageError) or not tell_guard(error):
            _tell(error, rest, mail, group)
        raise
    # Every rank asks at the end of every step, also if all went well here.
    noted, first = _settled(group, failed=False, noted=note())
    if first is not None:
        raise StageError(first.text, first.kind)
    return noted


class _Failure(NamedTuple):
    """An error of a rank: when it came, the name of its class, and a text that says where."""

    time: float
    kind: str
    text: str


def _tell(error: Exception, rest: Program, mail: Mail, group: ProcessGroup | None) -> None:
    """Let the messages that are left pass, and tell the others of an error.

    Args:
        error: The error.
        rest: The program from the task or message on that has failed.
        mail: The outputs on their way.
        group: The pipeline.

    Raises:
        StageError: It came of what another rank has told.
    """
    own = None if isinstance(error, StageError) else _failure(error, rest)
    first = None
    with suppress(Exception):  # what has happened first is raised, whatever else fails now
        # Those that have begun are under way as they are; all later ones pass empty, in their
        # order, so that sends and receives still pair on both sides.
        mail.skip(each for each in rest if isinstance(each, Message))
        mail.finish()
        _, first = _settled(group, failed=True, own=own)
    if first is None:
        return
    if own is None:
        raise StageError(first.text, first.kind) from None
    if first != own:  # it may have come of that, by what was missing then
        error.add_note(f"Before that, {first.text}")


def _settled(
    group: ProcessGroup | None,
    *,
    failed: bool,
    noted: bool = False,
    own: _Failure | None = None,
) -> tuple[bool, _Failure | None]:
    """End the step, on all ranks.

    Returns:
        Whether any rank has noted something, and the first failure, or None.
    """
    if group is None:
        return noted, None
    told = torch.tensor([failed, noted])  # on the CPU: no queue is waited for
    failed, noted = torch.stack(all_gather(told, group=group)).any(0).tolist()
    if not failed:
        return noted, None
    found = [each for each in all_gather_object(own, group=group) if each is not None]
    return noted, min(found)


def _failure(error: Exception, rest: Program) -> _Failure:
    """Say who failed where, with the type and the message of the error from the first line on."""
    where = f"{rest[0]} of this step" if rest else "its last messages"
    kind = type(error)
    own = kind.__module__ in ("builtins", "__main__")
    name = kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    text = f"{describe_rank()} failed in {where}: {name}: {error}{notes}"
    # Also what no codec takes.
    return _Failure(time.time(), name, text.encode(errors="backslashreplace").decode())
