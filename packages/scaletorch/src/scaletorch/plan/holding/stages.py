"""Which blocks lie on which rank of the pipeline, and what a schedule keeps alive there.

As the pipeline itself distributes them: layers by count, what stands before them on the first
stage and what stands behind them on the last; the stages of a rank are those of its schedule.
"""

from __future__ import annotations

from functools import cache, partial

from ...dist.errors import InvalidArgumentError
from ...parallel.pipeline_parallel import (
    SCHEDULES,
    Schedule,
    distribute_layers,
)
from ..description import Description
from ..layout import LOOPED, V_SHAPED, Layout

Places = tuple[tuple[tuple[int, ...], ...], ...]
"""For each rank of the pipeline, for each of its chunks: indices of blocks."""


def schedule_of(layout: Layout) -> Schedule:
    """Return the schedule of a layout, action by action.

    Raises:
        InvalidArgumentError: An unknown schedule, or chunks that it does not have.
    """
    _check(layout.schedule, layout.grid.pp, layout.chunks)
    build = SCHEDULES[layout.schedule]
    if layout.schedule in LOOPED:
        build = partial(LOOPED[layout.schedule], num_chunks=layout.chunks)
    return build(layout.grid.pp, layout.micro_batches)


@cache
def stages_of(schedule: str, pp: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank of the pipeline, chunk by chunk.

    Raises:
        InvalidArgumentError: An unknown schedule, or chunks that it does not have.
    """
    _check(schedule, pp, chunks)
    if schedule in V_SHAPED:
        return tuple((rank, 2 * pp - 1 - rank) for rank in range(pp))
    return tuple(tuple(range(rank, pp * chunks, pp)) for rank in range(pp))


def places(description: Description, layout: Layout) -> Places:
    """Return which blocks each rank of the pipeline has, chunk by chunk.

    Raises:
        InvalidArgumentError: Fewer layers than stages, or a schedule that is not to be had.
    """
    where = [block.place for block in description.blocks]
    sizes = where.count("first"), where.count("layer"), where.count("last")
    return _places(*sizes, layout.schedule, layout.grid.pp, layout.chunks)


@cache
def _places(first: int, layers: int, last: int, schedule: str, pp: int, chunks: int) -> Places:
    stages = stages_of(schedule, pp, chunks)
    count = sum(map(len, stages))
    if count == 1:
        return ((tuple(range(first + layers + last)),),)
    if layers < count:
        raise InvalidArgumentError(
            f"{layers} layers are fewer than {count} stages: pp {pp}"
            + (f" x {chunks} chunks" if chunks > 1 else "")
        )
    cut = [[first + layer for layer in each] for each in distribute_layers(layers, count)]
    cut[0] = [*range(first), *cut[0]]
    cut[-1] += range(first + layers, first + layers + last)
    return tuple(tuple(tuple(cut[stage]) for stage in own) for own in stages)


def holders_of(description: Description, where: Places) -> dict[str, set[int]]:
    """Return the ranks of the pipeline that have a tied parameter, by each of its names."""
    on: dict[int, set[int]] = {}
    for rank, chunks in enumerate(where):
        for at in (at for chunk in chunks for at in chunk):
            on.setdefault(description.blocks[at].kind, set()).add(rank)
    return {
        name: {r for each in names for r in on.get(int(each.partition(".")[0]), ())}
        for names in description.tied
        for name in names
    }


def _check(schedule: str, pp: int, chunks: int) -> None:
    if schedule not in SCHEDULES or schedule == "forward_only":
        known = ", ".join(name for name in SCHEDULES if name != "forward_only")
        raise InvalidArgumentError(f"schedule {schedule!r} is not one of {known}")
    wanted = 2 if schedule in V_SHAPED else 1
    if chunks < 1 or (schedule not in LOOPED and chunks != wanted):
        some = "1 or more" if schedule in LOOPED else str(wanted)
        raise InvalidArgumentError(
            f"{schedule} has {some} chunks on each rank of the pipeline, not {chunks}"
        )
