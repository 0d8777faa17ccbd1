"""The proof that every rank's sends and receives meet, whoever wrote them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from .messages import Operation, Programs, Receive, Send
from .numbering import Numbered, ScheduleError, number
from .schedule import Action, Schedule
from .simulate import Costs, deadlock, run

Place = tuple[int, int]  # the rank, and which of its groups


@dataclass(frozen=True, slots=True)
class Traffic:
    """All messages, by the slot of the action that made them.

    Attributes:
        sends: Where each is sent, each rank's in their order.
        receives: Where each is received, likewise.
        groups: For each rank its messages, in the groups that are completed together.
    """

    sends: dict[int, Place] = field(default_factory=dict)
    receives: dict[int, Place] = field(default_factory=dict)
    groups: list[list[list[int]]] = field(default_factory=list)


def check_programs(schedule: Schedule, programs: Programs, *, grouped: bool = False) -> None:
    """Prove that sends and receives among a schedule's actions are right and cannot deadlock.

    Every output that another rank needs must be sent once, after it was made, and received once,
    before it is needed, by the ranks that have these stages; and between two ranks the messages of
    one direction must be received in the order in which they are sent.

    Args:
        schedule: The actions; it is checked first.
        programs: For each rank its actions in their order, with `Send` and `Receive` between them.
        grouped: Messages with no action between them are posted and completed together. Otherwise
            each waits alone until its other side is reached.

    Raises:
        ScheduleError: They are not right; the message says what is wrong, and on which rank.
    """
    numbered = number(schedule)
    run(numbered, Costs())
    if len(programs) != schedule.num_ranks:
        raise ScheduleError(f"expected {schedule.num_ranks} programs, got {len(programs)}")
    traffic = Traffic()
    for rank, program in enumerate(programs):
        _read(numbered, rank, program, grouped, traffic)
    _require_sent(numbered, traffic)
    _require_order(numbered, traffic)
    _require_end(numbered, traffic)


def _read(
    numbered: Numbered, rank: int, program: Sequence[Operation], grouped: bool, traffic: Traffic
) -> None:
    """Note the messages of one rank."""
    size = numbered.schedule.num_micro_batches
    needed = {block + 1 for block in numbered.crossings}
    actions = [op for op in program if isinstance(op, Action)]
    if actions != list(numbered.schedule.ranks[rank]):
        raise _wrong(numbered, rank, "its actions must be those of the schedule, in their order")
    slots = iter(numbered.slots[rank])
    made: set[int] = set()
    groups: list[list[int]] = []
    together = False
    for op in program:
        if isinstance(op, Action):
            slot = next(slots)
            made.add(slot)
            if slot // size in needed and slot - size not in traffic.receives:
                raise _wrong(numbered, rank, f"{op} must come after a receive of its input")
        else:
            slot = _slot(numbered, rank, op)
            places = traffic.sends if isinstance(op, Send) else traffic.receives
            if slot in places:
                raise _wrong(numbered, rank, f"it must {op} once, not twice")
            if isinstance(op, Send) and slot not in made:
                raise _wrong(numbered, rank, f"{op} must come after the action that makes it")
            if not together:
                groups.append([])
            groups[-1].append(slot)
            places[slot] = rank, len(groups) - 1
        together = grouped and not isinstance(op, Action)
    traffic.groups.append(groups)


def _slot(numbered: Numbered, rank: int, message: Send | Receive) -> int:
    """Return the slot of what a message carries.

    Raises:
        ScheduleError: No such message goes from or to this rank.
    """
    num_stages, size = numbered.schedule.num_stages, numbered.schedule.num_micro_batches
    block = 2 * num_stages - message.stage if message.gradient else message.stage + 1
    in_range = 0 <= message.stage < num_stages and 0 <= message.micro_batch < size
    if in_range and block in numbered.crossings:
        ends = numbered.owners[block], numbered.owners[block + 1]
        if ends == ((rank, message.peer) if isinstance(message, Send) else (message.peer, rank)):
            return block * size + message.micro_batch
    raise _wrong(numbered, rank, f"it has nothing to {message}")


def _require_sent(numbered: Numbered, traffic: Traffic) -> None:
    size = numbered.schedule.num_micro_batches
    for block in numbered.crossings:
        for slot in range(block * size, (block + 1) * size):
            if slot not in traffic.sends:
                rank = numbered.owners[block]
                raise _wrong(numbered, rank, f"it does not {_message(numbered, rank, slot)}")


def _require_order(numbered: Numbered, traffic: Traffic) -> None:
    size, owners = numbered.schedule.num_micro_batches, numbered.owners
    received = defaultdict(list)
    for slot in traffic.receives:
        received[owners[slot // size], owners[slot // size + 1]].append(slot)
    queues = {ends: iter(slots) for ends, slots in received.items()}
    for slot in traffic.sends:
        source, target = owners[slot // size], owners[slot // size + 1]
        other = next(queues[source, target])
        if other != slot:
            first, second = (_message(numbered, source, s) for s in (slot, other))
            reason = f"{first} comes before {second}, and rank {target} receives them in another"
            raise _wrong(numbered, source, f"{reason} order; expected the same order")


def _require_end(numbered: Numbered, traffic: Traffic) -> None:
    """Run the groups; a message is through once both its sides are reached."""
    groups = traffic.groups
    reached = [0] * len(groups)
    ready = list(range(len(groups)))
    while ready:
        rank = ready.pop()
        while reached[rank] < len(groups[rank]) and not _waited_for(traffic, reached, rank):
            reached[rank] += 1
            if reached[rank] < len(groups[rank]):
                ready += [_other(traffic, rank, slot)[0] for slot in groups[rank][reached[rank]]]

    def wait(rank: int) -> tuple[str, int]:
        slot, other = _waited_for(traffic, reached, rank)[0]
        return f"waits to {_message(numbered, rank, slot)}".removesuffix(f" rank {other}"), other

    for rank, place in enumerate(reached):
        if place < len(groups[rank]):
            raise deadlock(numbered.schedule, rank, wait)


def _other(traffic: Traffic, rank: int, slot: int) -> Place:
    """Return the other side of a message of this rank."""
    place = traffic.sends[slot]
    return traffic.receives[slot] if place[0] == rank else place


def _waited_for(traffic: Traffic, reached: list[int], rank: int) -> list[tuple[int, int]]:
    """Return messages of this rank's group that are not through, each with who is not there."""
    slots = traffic.groups[rank][reached[rank]]
    others = [_other(traffic, rank, slot) for slot in slots]
    pairs = zip(slots, others, strict=True)
    return [(slot, other) for slot, (other, group) in pairs if reached[other] < group]


def _message(numbered: Numbered, rank: int, slot: int) -> Send | Receive:
    """Return this rank's side of a message."""
    block, micro_batch = divmod(slot, numbered.schedule.num_micro_batches)
    source, target = numbered.owners[block], numbered.owners[block + 1]
    gradient = block > numbered.schedule.num_stages
    if rank == source:
        return Send(target, numbered.stage(block), micro_batch, gradient)
    return Receive(source, numbered.stage(block), micro_batch, gradient)


def _wrong(numbered: Numbered, rank: int, reason: str) -> ScheduleError:
    return ScheduleError(f"schedule {numbered.schedule.name!r}: program of rank {rank}: {reason}")
