"""What ranks send and receive, derived from the actions that they run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .numbering import Numbered, number
from .schedule import Action, Schedule
from .simulate import Costs, Times, run


class Send(NamedTuple):
    """This rank sends what one of its actions made.

    Attributes:
        peer: The rank that receives it.
        stage: The stage that made it, on both sides.
        micro_batch: Of which micro-batch.
        gradient: Whether it is the gradient of hidden states, not hidden states; it goes from
            stage s to s - 1, and hidden states to s + 1.
    """

    peer: int
    stage: int
    micro_batch: int
    gradient: bool

    def __str__(self) -> str:
        """Write it as ``send F3 of stage 0 to rank 1``, a gradient as ``send B3 ...``."""
        return f"send {_made(self)} to rank {self.peer}"


class Receive(NamedTuple):
    """This rank receives what an action of another made; the attributes are those of `Send`.

    Attributes:
        peer: The rank that sends it.
        stage: The stage that made it.
        micro_batch: Of which micro-batch.
        gradient: Whether it is a gradient.
    """

    peer: int
    stage: int
    micro_batch: int
    gradient: bool

    def __str__(self) -> str:
        """Write it as ``receive F3 of stage 0 from rank 1``."""
        return f"receive {_made(self)} from rank {self.peer}"


Operation = Action | Send | Receive
Programs = Sequence[Sequence[Operation]]


def _made(message: Send | Receive) -> str:
    kind = "B" if message.gradient else "F"
    return f"{kind}{message.micro_batch} of stage {message.stage}"


def derive_messages(schedule: Schedule) -> tuple[tuple[Operation, ...], ...]:
    """Add sends and receives to each rank's actions.

    Returns:
        Each rank's program. An output is sent right after the action that made it, other messages
        aside; it is received where the receiver, by the times of `simulate`, waits for it or has
        just ended an action. Between two stages of one rank nothing is sent.

    Raises:
        ScheduleError: A schedule that `check` refuses.
    """
    numbered = number(schedule)
    times = run(numbered, Costs())
    return tuple(_program(numbered, times, rank) for rank in range(schedule.num_ranks))


def derive_program(schedule: Schedule, rank: int) -> tuple[Operation, ...]:
    """Return what `derive_messages` has for one rank, in less time.

    Raises:
        ScheduleError: A schedule that `check` refuses.
    """
    numbered = number(schedule)
    return _program(numbered, run(numbered, Costs()), rank)


def _program(numbered: Numbered, times: Times, rank: int) -> tuple[Operation, ...]:
    # All actions and messages stand in one order over all ranks: an action at its start, a message
    # at the end of the action that made it, before the actions that start then; messages of one
    # time by block and micro-batch. Each program is its rank's part of that order. So ranks cannot
    # deadlock, even where a send waits for its receive: of what has not run, take the first in the
    # order. All that comes before it on its ranks has run, so an action has its inputs, and of a
    # message both sides have arrived. Neighbouring messages may as well be posted together: that
    # first message still has both sides posted, hence a group is complete after finitely many.
    # And two ranks see the messages between them in the same order, so they match as they come.
    owners, size = numbered.owners, numbered.schedule.num_micro_batches
    blocks = [b for b in numbered.crossings if rank in (owners[b], owners[b + 1])]
    slots = [slot for b in blocks for slot in range(b * size, (b + 1) * size)]
    slots.sort(key=times.ends.__getitem__)
    half = numbered.schedule.num_stages
    rows = {
        b: (Send, owners[b + 1], numbered.stage(b), b > half)
        if owners[b] == rank
        else (Receive, owners[b], numbered.stage(b), b > half)
        for b in blocks
    }
    messages: list[Send | Receive] = []
    for slot in slots:
        kind, peer, stage, gradient = rows[slot // size]
        messages.append(kind(peer, stage, slot % size, gradient))
    starts = list(map(times.starts.__getitem__, numbered.slots[rank]))
    moments = list(map(times.ends.__getitem__, slots))
    return _merged(numbered.schedule.ranks[rank], starts, messages, moments)


def _merged(
    actions: Sequence[Action],
    starts: list[float],
    messages: list[Send | Receive],
    moments: list[float],
) -> tuple[Operation, ...]:
    program: list[Operation] = []
    done = 0
    moments = [*moments, math.inf]  # so that the last message needs no test of its own
    for action, start in zip(actions, starts, strict=True):
        if moments[done] <= start:
            first = done
            while moments[done] <= start:
                done += 1
            program += messages[first:done]
        program.append(action)
    return (*program, *messages[done:])
