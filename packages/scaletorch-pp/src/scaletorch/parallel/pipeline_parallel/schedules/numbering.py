"""A schedule's actions as whole numbers, so that large schedules are checked in little time.

Every action has a slot, `block * num_micro_batches + micro_batch`. With S stages the blocks are:
0 the data, 1 to S the forwards of stages 0 to S - 1, S + 1 to 2 S the backwards (of inputs) of
stages S - 1 down to 0, 2 S + 1 to 3 S the weight backwards of stages 0 to S - 1. So a forward or a
backward in slot x always consumes the output of slot x - num_micro_batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from ....dist.errors import InvalidArgumentError
from .schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, KINDS, Action, Schedule

WHOLE, SPLIT = 1, 2  # how an action's slot was filled; only a backward of inputs is SPLIT


class ScheduleError(InvalidArgumentError):
    """A schedule that cannot run, or would not compute every gradient; the message says where."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """A schedule whose every action is in range, present once, and in order on its rank.

    Attributes:
        schedule: The schedule itself.
        owners: The rank of each block; that of the data is rank 0.
        slots: Each rank's actions as slots.
        filled: For each slot 0, WHOLE or SPLIT.
        forward_only: Whether there is no backward at all.
        crossings: The blocks whose output goes to another rank.
    """

    schedule: Schedule
    owners: list[int]
    slots: list[list[int]]
    filled: bytearray
    forward_only: bool
    crossings: list[int]

    def name(self, slot: int) -> str:
        """Return an action as text such as `F3`, without its chunk."""
        block, micro_batch = divmod(slot, self.schedule.num_micro_batches)
        backward = BACKWARD_INPUT if self.filled[slot] == SPLIT else BACKWARD
        kinds = (FORWARD, backward, BACKWARD_WEIGHT)
        return f"{kinds[(block - 1) // self.schedule.num_stages]}{micro_batch}"

    def stage(self, block: int) -> int:
        """Return the stage of a block."""
        return stage_of(block, self.schedule.num_stages)


def stage_of(block: int, num_stages: int) -> int:
    """Return the stage of a block; that of the data is stage 0."""
    if num_stages < block <= 2 * num_stages:
        return 2 * num_stages - block
    return max(block - 1, 0) % num_stages


def number(schedule: Schedule) -> Numbered:
    """Number the actions of a schedule.

    Raises:
        ScheduleError: A stage without a rank or on two; an action out of range, twice, missing, or
            before one on its rank that it needs. Waiting between ranks is not looked at.
    """
    _require_stages(schedule)
    size = schedule.num_micro_batches
    filled = bytearray((3 * schedule.num_stages + 1) * size)
    filled[:size] = bytes([WHOLE]) * size
    slots = [_of_rank(schedule, rank, filled) for rank in range(schedule.num_ranks)]
    forward_only = not any(filled[(schedule.num_stages + 1) * size :])
    _require_all(schedule, filled, forward_only)
    owners = [
        schedule.places[stage_of(block, schedule.num_stages)][0]
        for block in range(3 * schedule.num_stages + 1)
    ]
    last = schedule.num_stages * (1 if forward_only else 2)
    crossings = [b for b in range(1, last) if owners[b] != owners[b + 1]]
    return Numbered(schedule, owners, slots, filled, forward_only, crossings)


def _require_stages(schedule: Schedule) -> None:
    stages = sorted(chain.from_iterable(schedule.stages))
    problem = ""
    if schedule.num_micro_batches < 1:
        problem = f"expected at least 1 micro-batch, got {schedule.num_micro_batches}"
    elif len(schedule.stages) != len(schedule.ranks):
        problem = f"got stages of {len(schedule.stages)} ranks, actions of {len(schedule.ranks)}"
    elif not stages or stages != list(range(len(stages))):
        problem = f"each of the stages 0, 1, 2, ... must be on exactly one rank, got {stages}"
    if problem:
        raise ScheduleError(f"schedule {schedule.name!r}: {problem}")


def _of_rank(schedule: Schedule, rank: int, filled: bytearray) -> list[int]:
    rows = _rows(schedule, rank)
    size = schedule.num_micro_batches
    slots: list[int] = []
    for kind, micro_batch, chunk in schedule.ranks[rank]:
        row = rows.get((kind, chunk))
        if row is None or not 0 <= micro_batch < size:
            raise _wrong(schedule, rank, len(slots))
        first, needs, how, fills = row
        slot = first + micro_batch
        if filled[slot] or filled[needs + micro_batch] != how:
            raise _wrong(schedule, rank, len(slots), twice=bool(filled[slot]))
        filled[slot] = fills
        slots.append(slot)
    return slots


def _rows(schedule: Schedule, rank: int) -> dict[tuple[str, int], tuple[int, int, int, int]]:
    """Return four numbers for each kind and chunk of a rank.

    The first slot of its actions, the first slot of those that they need, how these must be filled,
    and how the action fills its own slot.
    """
    size, num_stages = schedule.num_micro_batches, schedule.num_stages
    rows = {}
    for chunk, stage in enumerate(schedule.stages[rank]):
        forward = (stage + 1) * size
        backward = (2 * num_stages - stage) * size
        rows[FORWARD, chunk] = forward, 0, WHOLE, WHOLE
        rows[BACKWARD, chunk] = backward, forward, WHOLE, WHOLE
        rows[BACKWARD_INPUT, chunk] = backward, forward, WHOLE, SPLIT
        rows[BACKWARD_WEIGHT, chunk] = forward + 2 * num_stages * size, backward, SPLIT, WHOLE
    return rows


def _wrong(schedule: Schedule, rank: int, place: int, *, twice: bool = False) -> ScheduleError:
    """Return the error about an action that cannot run."""
    action, chunks = schedule.ranks[rank][place], len(schedule.stages[rank])
    if action.kind not in KINDS:
        reason = f"the kind must be one of {', '.join(KINDS)}"
    elif not 0 <= action.chunk < chunks:
        reason = f"rank {rank} has {chunks} chunks, counted from 0, got chunk {action.chunk}"
    elif not 0 <= action.micro_batch < schedule.num_micro_batches:
        reason = f"micro-batches are 0 to {schedule.num_micro_batches - 1}"
    elif twice:
        reason = "it has run already; each micro-batch has one F, and one B or one I and one W"
    else:
        first, rule = FORWARD, "a backward must come after its forward"
        if action.kind == BACKWARD_WEIGHT:
            first, rule = BACKWARD_INPUT, "W must come after I; after B there is no W"
        reason = f"it comes without {action._replace(kind=first)} before it; {rule}"
    where = f"rank {rank}, action {place} ({action})"
    return ScheduleError(f"schedule {schedule.name!r}: {where}: {reason}")


def _require_all(schedule: Schedule, filled: bytearray, forward_only: bool) -> None:
    size, num_stages = schedule.num_micro_batches, schedule.num_stages
    stop = ((1 if forward_only else 2) * num_stages + 1) * size
    slot = filled.find(0, 0, stop)
    if slot >= 0:
        kind = FORWARD if slot < (num_stages + 1) * size else BACKWARD
        raise _missing(schedule, kind, stage_of(slot // size, num_stages), slot % size)
    if filled.count(SPLIT) == sum(filled[stop:]):
        return
    for stage in range(num_stages):
        for micro_batch in range(size):
            split = filled[(2 * num_stages - stage) * size + micro_batch] == SPLIT
            if split and not filled[(2 * num_stages + 1 + stage) * size + micro_batch]:
                raise _missing(schedule, BACKWARD_WEIGHT, stage, micro_batch)


def _missing(schedule: Schedule, kind: str, stage: int, micro_batch: int) -> ScheduleError:
    rank, chunk = schedule.places[stage]
    rule = {BACKWARD: " (or I and W)", BACKWARD_WEIGHT: "; its weight gradients would be lost"}
    return ScheduleError(
        f"schedule {schedule.name!r}: rank {rank}: {Action(kind, micro_batch, chunk)} of stage "
        f"{stage} is missing{rule.get(kind, '')}"
    )
