"""When the ranks of a pipeline are done: the schedule simulated, or a closed form if it is long."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ...parallel.pg_manager import Grid
from ...parallel.pipeline_parallel import Costs, Schedule, Timeline, simulate
from ..holding.stages import schedule_of
from ..layout import Layout
from .closed import LONG, makespan
from .sharing import shared_ends


class Stage(NamedTuple):
    """Seconds of a stage for a micro-batch.

    Attributes:
        forward: With the messages that it waits for.
        backward: As well.
        weights: Of that, for the gradients of weights, if a schedule puts them off.
    """

    forward: float
    backward: float
    weights: float = 0.0


def ends(
    name: str, chunks: int, micro_batches: int, stages: Sequence[Stage], message: float,
    speeds: Sequence[float] = (),
) -> list[float]:  # fmt: skip
    """Return when each rank of the pipeline ends its last action.

    Args:
        name: Of the schedule.
        chunks: Stages of a rank.
        micro_batches: Of a step.
        stages: In the order of the forward.
        message: Seconds from a stage to the next.
        speeds: If ranks share cores: how much quicker each is while 1, 2 ... ranks of the pipeline
            compute than while all do; () if each has a device of its own.
    """
    ranks = len(stages) // chunks
    if ranks == 1:
        return [micro_batches * sum(each.forward + each.backward for each in stages)]
    if ranks * chunks * micro_batches > LONG:
        return makespan(name, chunks, micro_batches, stages, message)
    schedule = built(name, ranks, micro_batches, chunks)
    if speeds:
        return shared_ends(schedule, stages, message, speeds)
    return _simulated(schedule, stages, message)


@lru_cache(maxsize=256)
def built(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """Return a schedule of the table."""
    grid = Grid(pp=ranks)
    return schedule_of(Layout(grid, schedule=name, chunks=chunks, micro_batches=micro_batches))


def _simulated(schedule: Schedule, stages: Sequence[Stage], message: float) -> list[float]:
    found = [0.0] * schedule.num_ranks
    for span in simulated(schedule, stages, message).spans:
        found[span.rank] = max(found[span.rank], span.end)
    return found


def simulated(schedule: Schedule, stages: Sequence[Stage], message: float) -> Timeline:
    """Return when actions run, by a factor for each stage on the mean of forward and backward.

    If no stage has any work, messages are all that takes time.
    """
    forward, backward, weights = (sum(each) for each in zip(*stages, strict=True))
    whole, tiny = forward + backward, 1e-12 * (1 + forward + backward)
    factors = [max(tiny, (each.forward + each.backward) / (whole or 1)) for each in stages]
    costs = Costs(
        max(forward, tiny), max(backward, tiny), max(backward - weights, tiny),
        max(weights, tiny), message, factors,
    )  # fmt: skip
    return simulate(schedule, costs)
