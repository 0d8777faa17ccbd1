"""The messages between ranks, derived from the actions that they run."""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

from .numbering import Numbered
from .schedule import Action, Schedule
from .simulate import Times, proven


class Message(NamedTuple):
    """A message between two ranks, as one of them sees it.

    Attributes:
        peer: The other rank.
        stage: The stage that made it, on both sides.
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
        """Its content as text such as `F3 of stage 0`, or `B3 ...` of a gradient."""
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


Operation = Action | Send | Receive


def derive_messages(schedule: Schedule) -> tuple[tuple[Operation, ...], ...]:
    """Add sends and receives to each rank's actions.

    Returns:
        Each rank's program. An output is sent right after the action that made it, other messages
        aside; it is received when the receiver, by the times of `simulate`, waits for it or has
        just ended an action. Between two stages of one rank nothing is sent.

    Raises:
        ScheduleError: A schedule that `check` refuses.
    """
    numbered, times = proven(schedule)
    return tuple(program_of(numbered, times, rank) for rank in range(schedule.num_ranks))


def program_of(numbered: Numbered, times: Times, rank: int) -> tuple[Operation, ...]:
    """Return one rank's program of a schedule that is `proven`."""
    # All actions and messages stand in one order over all ranks: an action at its start, a message
    # at the end of the action that made it, before the actions that start then; messages of one
    # time by block and micro-batch. Each program is its rank's part of that order. So ranks cannot
    # deadlock, even where a send waits for its receive: of what has not run, take the first in the
    # order. All that comes before it on its ranks has run, so an action has its inputs, and of a
    # message both sides have arrived. Neighbouring messages may as well be posted together: that
    # first message still has both sides posted, hence a group is complete after finitely many.
    # And two ranks see the messages between them in the same order, so they match as they come.
    schedule, owners = numbered.schedule, numbered.owners
    size = schedule.num_micro_batches
    pairs = zip(numbered.slots[rank], schedule.ranks[rank], strict=True)
    events: list[tuple[float, bool, int, Operation]] = [
        (times.starts[slot], True, place, action) for place, (slot, action) in enumerate(pairs)
    ]
    for block in numbered.crossings:
        source, target = owners[block], owners[block + 1]
        if rank in (source, target):
            kind: type[Send | Receive] = Send if rank == source else Receive
            peer = target if rank == source else source
            stage, gradient = numbered.stage(block), block > schedule.num_stages
            for m in range(size):
                slot = block * size + m
                events.append((times.ends[slot], False, slot, kind(peer, stage, m, gradient)))
    return tuple(operation for *_, operation in sorted(events, key=itemgetter(0, 1, 2)))
