"""A rank's program of a step: its tasks and messages, in order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from .builders import AnySchedule, build_schedule
from .schedule import Schedule
from .simulate import Times, prove
from .tasks import Task, Tasks, receiver


class Message(NamedTuple):
    """A message between two ranks, as one of them sees it."""

    peer: int  # the other rank
    stage: int  # the stage that made the content; the same on both sides
    micro_batch: int
    gradient: bool  # of hidden states, from stage s to s - 1; else hidden states, from s to s + 1

    def __str__(self) -> str:
        """Return text such as `send F3 of stage 0 to rank 1`; a gradient is `B3`."""
        verb, to = ("receive", "from") if isinstance(self, Receive) else ("send", "to")
        content = f"{'B' if self.gradient else 'F'}{self.micro_batch} of stage {self.stage}"
        return f"{verb} {content} {to} rank {self.peer}"


class Send(Message):
    """A message that carries the output of one of this rank's actions to its peer."""

    __slots__ = ()


class Receive(Message):
    """The same message as the rank at its other end sees it."""

    __slots__ = ()


Program = Sequence[Task | Message]

AHEAD = 4  # tasks by which a receive may start early; each is one more buffer


class Plan(NamedTuple):
    """A schedule that was proven to run to its end, with one rank's program."""

    schedule: Schedule
    text: str  # name and digest of the schedule, to compare it between ranks
    program: Program  # the rank's tasks and messages, in order
    early: Program  # the same with receives that start early


@lru_cache(maxsize=64)
def plan_of(schedule: AnySchedule, num_ranks: int, num_micro_batches: int, rank: int) -> Plan:
    """Prove a schedule, and derive the program of one rank."""
    chosen = build_schedule(schedule, num_ranks, num_micro_batches)
    digest = hashlib.blake2b(str(chosen).encode(), digest_size=8).hexdigest()
    program = program_of(chosen, *prove(chosen), rank)
    text = f"schedule {chosen.name!r} ({digest})"
    return Plan(chosen, text, program, receive_early(program))


def program_of(schedule: Schedule, tasks: Tasks, times: Times, rank: int) -> Program:
    """Return one rank's program of a proven schedule: its tasks and messages, in order.

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


def receive_early(program: Program) -> Program:
    """Start each receive `AHEAD` tasks earlier, so that its message travels during these tasks.

    Tasks and sends keep their order, and so do receives: messages between two ranks still match.
    """
    places: list[tuple[int, bool]] = []
    tasks = 0  # so far
    for operation in program:
        is_task = isinstance(operation, Task)
        places.append((tasks - AHEAD * isinstance(operation, Receive), is_task))
        tasks += is_task
    return [program[index] for index in sorted(range(len(program)), key=places.__getitem__)]
