"""Which schedule a pipeline runs, and so which stages its ranks have."""

from __future__ import annotations

from ....dist.errors import InvalidArgumentError
from . import SCHEDULES, Builder, Schedule
from .schedule import BACKWARD_WEIGHT

AnySchedule = str | Builder | Schedule


def built(schedule: AnySchedule, num_ranks: int, num_micro_batches: int) -> Schedule:
    """Return the schedule of a step.

    Raises:
        InvalidArgumentError: No such name, or a schedule of other sizes.
    """
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            message = f"schedule {schedule!r} is not one of {', '.join(SCHEDULES)}"
            raise InvalidArgumentError(message)
        schedule = SCHEDULES[schedule]
    if not isinstance(schedule, Schedule):
        if not callable(schedule):
            raise InvalidArgumentError(
                "schedule must be a name, a Schedule, or a function of ranks and micro-batches "
                f"that returns one, got {type(schedule).__name__}"
            )
        schedule = schedule(num_ranks, num_micro_batches)
        if not isinstance(schedule, Schedule):
            message = f"schedule must return a Schedule, got {type(schedule).__name__}"
            raise InvalidArgumentError(message)
    sizes = schedule.num_ranks, schedule.num_micro_batches
    if sizes != (num_ranks, num_micro_batches):
        raise InvalidArgumentError(
            f"schedule {schedule.name!r} is for {sizes[0]} ranks and {sizes[1]} micro-batches, and "
            f"there are {num_ranks} ranks and {num_micro_batches} micro-batches"
        )
    return schedule


def stages_of(schedule: AnySchedule, num_ranks: int) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Return each rank's stages, chunk by chunk, and whether the schedule parts backwards.

    Raises:
        InvalidArgumentError: No such name, or a schedule for another number of ranks.
    """
    # Of others, as many micro-batches as it takes to see each kind of action.
    count = schedule.num_micro_batches if isinstance(schedule, Schedule) else 4 * num_ranks
    example = built(schedule, num_ranks, count)
    parts = any(action.kind == BACKWARD_WEIGHT for rank in example.ranks for action in rank)
    return example.stages, parts
