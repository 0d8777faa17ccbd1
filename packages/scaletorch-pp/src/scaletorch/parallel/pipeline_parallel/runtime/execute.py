"""Execution of a rank's program of a step, for any schedule and model.

If a stage raises in the middle of a step, every rank of the pipeline learns why at the end of the
step. Until then each rank keeps making its calls, since the ranks of one stage may communicate
inside it (tensor parallelism, experts).
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from ....dist import all_gather, all_gather_object
from ....dist.building import tell_guard
from ....dist.errors import RankFaultError
from ...pg_manager import describe_rank
from ..schedules.builders import AnySchedule, built
from ..schedules.schedule import Schedule
from ..schedules.simulate import Times, proven
from ..schedules.tasks import Message, Receive, Send, Task, Tasks, receiver
from .mail import Mail, StageError

Program = Sequence[Task | Message]


class Plan(NamedTuple):
    """A schedule that was proven to run to its end, with one rank's program."""

    schedule: Schedule
    text: str  # name and digest of the schedule, to compare it between ranks
    program: Program  # the rank's tasks and messages, in order


@lru_cache(maxsize=64)
def plan_of(schedule: AnySchedule, num_ranks: int, num_micro_batches: int, rank: int) -> Plan:
    """Prove a schedule, and derive the program of one rank."""
    chosen = built(schedule, num_ranks, num_micro_batches)
    digest = hashlib.blake2b(str(chosen).encode(), digest_size=8).hexdigest()
    program = program_of(chosen, *proven(chosen), rank)
    return Plan(chosen, f"schedule {chosen.name!r} ({digest})", program)


def program_of(schedule: Schedule, tasks: Tasks, times: Times, rank: int) -> Program:
    """Return one rank's program, its tasks and messages in order, of a schedule that is `proven`.

    An output is sent after the action that made it and before the next action. By the times of
    `simulate`, it is received when the receiver waits for it or has just ended an action. Nothing
    is sent between two stages of one rank.
    """
    # All actions and messages of all ranks have one global order: an action stands at its start, a
    # message at the end of the action that made it, before actions that start at that time.
    # Messages of the same time are ordered by stage and micro-batch, forwards first. Each program
    # is the subsequence of this order that belongs to its rank.
    # So ranks cannot deadlock, even if a send blocks until its receive. Proof: take the first
    # action or message in the order that has not run. Everything before it on its ranks has run, so
    # an action has its inputs, and both sides of a message have reached it. Adjacent messages may
    # also be posted as a batch: the first message still has both sides posted, so a batch completes
    # after finitely many steps. Two ranks see the messages between them in the same order, so their
    # sends and receives match.
    events: list[tuple[float, bool, tuple[int, ...], Task | Message]] = []
    for source, own in enumerate(tasks):
        for place, (task, (start, end)) in enumerate(zip(own, times[source], strict=True)):
            if source == rank:
                events.append((start, True, (place,), task))
            if task.makes is None:
                continue
            stage, micro_batch, gradient = task.makes
            target = receiver(schedule, task.makes)
            if target != source and rank in (source, target):
                order = (gradient, -stage if gradient else stage, micro_batch)
                send, peer = (Send, target) if rank == source else (Receive, source)
                events.append((end, False, order, send(peer, *task.makes)))
    return [operation for *_, operation in sorted(events, key=itemgetter(0, 1, 2))]


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
            _tell(error, rest, mail, group)
        raise
    # A collective: every rank calls it at the end of every step, whether it failed or not.
    noted, first = _settled(group, failed=False, noted=note())
    if first is not None:
        raise StageError(first.text, first.kind)
    return noted


class _Failure(NamedTuple):
    """A rank's error: its time, the name of its class, and a text that names the failed task."""

    time: float
    kind: str
    text: str


def _tell(error: Exception, rest: Program, mail: Mail, group: ProcessGroup | None) -> None:
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
        _, first = _settled(group, failed=True, own=own)
    if first is None:
        return
    if own is None:
        raise StageError(first.text, first.kind) from None
    if first != own:  # the earlier failure may have caused this one
        error.add_note(f"Before that, {first.text}")


def _settled(
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
