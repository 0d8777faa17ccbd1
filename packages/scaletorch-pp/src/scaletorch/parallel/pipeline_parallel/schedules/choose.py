"""Schedules by name, and the schedule that a pipeline runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ....dist.errors import InvalidArgumentError
from .alternating import interleaved_1f1b, one_f_one_b, zb_h1
from .schedule import BACKWARD_WEIGHT, Schedule
from .sweeps import afab, forward_only, looped_breadth_first
from .v_shape import dualpipe_v, zb_v

Builder = Callable[[int, int], Schedule]  # (ranks, micro-batches)
AnySchedule = str | Builder | Schedule

SCHEDULES: Mapping[str, Builder] = {
    "afab": afab,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_breadth_first,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
    "dualpipe_v": dualpipe_v,
    "forward_only": forward_only,
}


def built(schedule: AnySchedule, num_ranks: int, num_micro_batches: int) -> Schedule:
    """Return the schedule of a step.

    Raises:
        InvalidArgumentError: An unknown name, or a schedule of other sizes.
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
    """Return each rank's stages, chunk by chunk, and whether the schedule splits backwards.

    Raises:
        InvalidArgumentError: An unknown name, or a schedule for another number of ranks.
    """
    # A function is asked for as many micro-batches as it takes to see each kind of action.
    count = schedule.num_micro_batches if isinstance(schedule, Schedule) else 4 * num_ranks
    example = built(schedule, num_ranks, count)
    splits = any(action.kind == BACKWARD_WEIGHT for rank in example.ranks for action in rank)
    return example.stages, splits
