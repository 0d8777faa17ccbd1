"""Execution of a rank's program of a step, for any schedule and model.

If a stage raises in the middle of a step, every rank of the pipeline learns why at the end of the
step. Until then each rank keeps making its calls, since the ranks of one stage may communicate
inside it (tensor parallelism, experts).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from ....dist import all_gather, all_gather_object
from ....dist.building import tell_guard
from ....dist.errors import RankFaultError
from ...pg_manager import describe_rank
from ..schedules.program import Message, Program
from ..schedules.tasks import Task
from .mail import Mail, StageError


def execute(
    program: Program,
    mail: Mail,
    run: Callable[[Task], None],
    group: ProcessGroup | None,
    note: Callable[[], bool],
) -> bool:
    """Start messages, wait for the input of each task, and run it.

    If anything raises on any rank, all ranks raise. The remaining messages are still sent, without
    contents, so that no rank waits forever and none is left over for the next step. If a guard is
    on, it informs all ranks instead, also those outside the pipeline that wait for this one.

    Returns:
        Whether `note` returned true on any rank, once the step has ended.
    """
    rest = deque(program)
    try:
        while rest:
            operation = rest[0]
            if isinstance(operation, Message):
                mail.start(operation)
            else:
                mail.flush()
                if operation.needs is not None:
                    mail.wait(operation.needs)
                run(operation)
            rest.popleft()
        mail.finish()  # inside the try, since the step fails if a last message does
    except RankFaultError:  # all ranks know of the fault, and no more messages will come
        raise
    except Exception as error:
        if isinstance(error, StageError) or not tell_guard(error):
            _report(error, rest, mail, group)
        raise
    # A collective: every rank calls it at the end of every step, whether it failed or not.
    noted, first = _gather_failures(group, failed=False, noted=note())
    if first is not None:
        raise StageError(first.text, first.kind)
    return noted


class _Failure(NamedTuple):
    """A rank's error: its time, the name of its class, and a text that names the failed task."""

    time: float
    kind: str
    text: str


def _report(error: Exception, rest: Program, mail: Mail, group: ProcessGroup | None) -> None:
    """Send and receive the remaining messages empty, and report an error to the other ranks.

    `rest` is the rest of the program, from the failed task or message.
    """
    own = None if isinstance(error, StageError) else _failure(error, rest)
    first = None
    with suppress(Exception):  # the first error is raised, whatever fails during the clean-up
        # Messages that have started finish as they are. All later ones pass empty, in their order,
        # so that sends and receives still match on both sides.
        mail.skip(message for message in rest if isinstance(message, Message))
        mail.finish()
        _, first = _gather_failures(group, failed=True, own=own)
    if first is None:
        return
    if own is None:
        raise StageError(first.text, first.kind) from None
    if first != own:  # the earlier failure may have caused this one
        error.add_note(f"Before that, {first.text}")


def _gather_failures(
    group: ProcessGroup | None,
    *,
    failed: bool,
    noted: bool = False,
    own: _Failure | None = None,
) -> tuple[bool, _Failure | None]:
    """Return whether `noted` on any rank, and the first failure or None; all ranks call it."""
    if group is None:
        return noted, None
    flags = torch.tensor([failed, noted])  # on the CPU, so that no device has to be waited for
    failed, noted = torch.stack(all_gather(flags, group=group)).any(0).tolist()
    if not failed:
        return noted, None
    failures = [one for one in all_gather_object(own, group=group) if one is not None]
    return noted, min(failures)


def _failure(error: Exception, rest: Program) -> _Failure:
    """Describe a failure: the rank, its task, and the type, message and notes of the error."""
    where = f"{rest[0]} of this step" if rest else "its last messages"
    kind = type(error)
    own = kind.__module__ in ("builtins", "__main__")
    name = kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    text = f"{describe_rank()} failed in {where}: {name}: {error}{notes}"
    # A message may hold characters that cannot be encoded, such as lone surrogates.
    return _Failure(time.time(), name, text.encode(errors="backslashreplace").decode())
