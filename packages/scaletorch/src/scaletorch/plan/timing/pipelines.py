"""When the ranks of a pipeline are done: its schedule, simulated.

A pipeline repeats itself: a long one is simulated twice with few micro-batches, and each further
round takes what the last one took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ...parallel.pg_manager import Grid
from ...parallel.pipeline_parallel import Costs, Schedule, Timeline, simulate
from ...parallel.pipeline_parallel.schedules import rank_ends
from ..layout import Layout
from ..stages import schedule_of

DIGITS = 2  # of the ratios of times by which simulations are told apart


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


def ends(layout: Layout, stages: Sequence[Stage], message: float) -> list[float]:
    """Return when each rank of the pipeline ends its last action.

    Args:
        layout: With the schedule.
        stages: In the order of the forward.
        message: Seconds from a stage to the next.
    """
    number, ranks = layout.micro_batches, layout.grid.pp
    if ranks == 1:
        return [number * sum(each.forward + each.backward for each in stages)]
    costs = _costs(stages, message)
    unit = (costs.forward + costs.backward) / len(stages)

    def share(seconds: float) -> float:
        return max(round(seconds / unit, DIGITS), 1e-12)

    alike = (
        layout.schedule, layout.chunks, ranks, share(costs.forward), share(costs.backward),
        share(costs.backward_input), share(costs.backward_weight),
        round(message / unit, DIGITS + 1),
        tuple(max(round(each * len(stages), DIGITS) / len(stages), 1e-12) for each in costs.stages),
    )  # fmt: skip
    few = (2 if layout.chunks > 1 else 1) * ranks + number % ranks
    if number <= few + ranks:
        return [end * unit for end in _ends(*alike, number)]
    near, far = _ends(*alike, few), _ends(*alike, few + ranks)
    rounds = (number - few) // ranks
    return [(a + (b - a) * rounds) * unit for a, b in zip(near, far, strict=True)]


@lru_cache(maxsize=4096)
def _ends(
    schedule: str, chunks: int, ranks: int, forward: float, backward: float, inputs: float,
    weights: float, message: float, stages: tuple[float, ...], number: int,
) -> list[float]:  # fmt: skip
    layout = Layout(Grid(pp=ranks), schedule=schedule, chunks=chunks, micro_batches=number)
    costs = Costs(forward, backward, inputs, weights, message, stages)
    return rank_ends(schedule_of(layout), costs)


def simulated(schedule: Schedule, stages: Sequence[Stage], message: float) -> Timeline:
    """Return when actions run."""
    return replace(simulate(schedule, _costs(stages, message)), unit="s")


def _costs(stages: Sequence[Stage], message: float) -> Costs:
    """Return costs with a factor for each stage on the mean of forward and backward.

    If no stage has any work, messages are all that takes time.
    """
    forward, backward, weights = (sum(each) for each in zip(*stages, strict=True))
    whole, tiny = forward + backward, 1e-12 * (1 + forward + backward)
    factors = [max(tiny, (each.forward + each.backward) / (whole or 1)) for each in stages]
    return Costs(
        max(forward, tiny), max(backward, tiny), max(backward - weights, tiny),
        max(weights, tiny), message, factors,
    )  # fmt: skip
