"""The messages between ranks, derived from the actions that they run."""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

from .schedule import Schedule
from .simulate import Times
from .tasks import Task, Tasks, receiver


class Message(NamedTuple):
    """A message between two ranks, as one of them sees it.

    Attributes:
        peer: The other rank.
        stage: The stage that made the content; the same on both sides.
        micro_batch: Its micro-batch.
        gradient: Whether it is the gradient of hidden states, which goes from stage s to s - 1;
            otherwise it is hidden states, which go from s to s + 1.
    """

    peer: int
    stage: int
    micro_batch: int
    gradient: bool

    @property
    def content(self) -> str:
        """The content as text: such as `F3 of stage 0`, or `B3 of stage 1` for a gradient."""
        return f"{'B' if self.gradient else 'F'}{self.micro_batch} of stage {self.stage}"


class Send(Message):
    """A message that carries the output of one of this rank's actions to its peer."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return text such as `send F3 of stage 0 to rank 1`."""
        return f"send {self.content} to rank {self.peer}"


class Receive(Message):
    """The same message as the rank at its other end sees it."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return text such as `receive F3 of stage 0 from rank 1`."""
        return f"receive {self.content} from rank {self.peer}"


def program_of(schedule: Schedule, tasks: Tasks, times: Times, rank: int) -> list[Task | Message]:
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
    return [each for *_, each in sorted(events, key=itemgetter(0, 1, 2))]
