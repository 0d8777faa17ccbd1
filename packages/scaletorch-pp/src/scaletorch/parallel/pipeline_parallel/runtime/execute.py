"""The runtime: executes one rank's program, whatever the schedule and the model are.

If a stage raises in the middle of a step, every rank of the pipeline learns why at the end of the
step: until then each makes the calls that all make, since the ranks of one stage may meet inside it
(tensor parallelism, experts).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch.distributed import ProcessGroup

from ....dist import all_gather, all_gather_object
from ....dist.building import tell_guard
from ....dist.errors import RankFaultError
from ...pg_manager import describe_rank
from .mail import Mail, StageError
from .program import Step, Task


def execute(
    steps: Sequence[Step],
    mail: Mail,
    run: Callable[[Task], None],
    group: ProcessGroup | None,
    note: Callable[[], bool],
) -> bool:
    """Start each step's messages, wait for the input of its task, and run it.

    If anything raises on any rank, all ranks raise. The messages that are left still pass,
    without contents, so that no rank waits in vain and none is left over for the next step. If a
    guard is on, it tells all ranks instead, also those outside the pipeline that wait for these.

    Args:
        steps: This rank's.
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
    task: Task | None = None
    try:
        for messages, task in steps:
            if messages:
                mail.start(messages)
            if task is not None:
                if task.needs is not None:
                    mail.wait(task.needs)
                run(task)
        mail.finish()  # in the try: a last message that fails fails the step too
    except RankFaultError:  # all ranks know it, and no message of theirs comes any more
        raise
    except Exception as error:
        if isinstance(error, StageError) or not tell_guard(error):
            _tell(error, steps, mail, group, task)
        raise
    # Every rank asks at the end of every step, also if all went well here.
    noted, first = _settled(group, failed=False, noted=note())
    if first is not None:
        raise StageError(*first)
    return noted


def _tell(
    error: Exception,
    steps: Sequence[Step],
    mail: Mail,
    group: ProcessGroup | None,
    task: Task | None,
) -> None:
    """Let the messages that are left pass, and tell the others of an error.

    Raises:
        StageError: It came of what another rank has told.
    """
    own = None if isinstance(error, StageError) else (time.time(), *_told(error, task))
    first = None
    with suppress(Exception):  # what has happened first is raised, whatever else fails now
        # Those that have begun are under way as they are; all later ones pass empty, in their
        # order, so that sends and receives still pair on both sides.
        mail.skip([message for step in steps for message in step.messages][mail.begun :])
        mail.finish()
        _, first = _settled(group, failed=True, own=own)
    if first is None:
        return
    if own is None:
        raise StageError(*first) from None
    if first != own[1:]:  # it may have come of that, by what was missing then
        error.add_note(f"Before that, {first[0]}")


def _settled(
    group: ProcessGroup | None,
    *,
    failed: bool,
    noted: bool = False,
    own: tuple[float, str, str] | None = None,
) -> tuple[bool, tuple[str, str] | None]:
    """End the step, on all ranks.

    Returns:
        Whether any rank has noted something; error and type of the first that failed, or None.
    """
    if group is None:
        return noted, None
    told = torch.tensor([failed, noted])  # on the CPU: no queue is waited for
    failed, noted = torch.stack(all_gather(told, group=group)).any(0).tolist()
    if not failed:
        return noted, None
    found = [each for each in all_gather_object(own, group=group) if each is not None]
    _, text, kind = min(found)
    return noted, (text, kind)


def _told(error: Exception, task: Task | None) -> tuple[str, str]:
    """Return who failed where and the error, from its type on in the first line; and that type."""
    where = "its last messages" if task is None else f"{task.action} of this step"
    kind = type(error)
    own = kind.__module__ in ("builtins", "__main__")
    name = kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    text = f"{describe_rank()} failed in {where}: {name}: {error}{notes}"
    return text.encode(errors="backslashreplace").decode(), name  # also what no codec takes
