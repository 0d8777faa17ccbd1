"""Schedules as data: the ordered list of forwards and backwards that one stage runs.

A schedule is a pure function ``(stage, num_stages, num_micro_batches) -> list[Action]``. It says
only what is computed and in which order; `transfers.derive` adds what is sent and received.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...dist.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the stage on one micro-batch (from 0)."""

    micro_batch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Backpropagate one micro-batch (from 0) through the stage."""

    micro_batch: int


Action = Forward | Backward
Schedule = Callable[[int, int, int], list[Action]]


def afab(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """All forwards, then all backwards, both in micro-batch order.

    Source: GPipe, https://arxiv.org/abs/1811.06965. Every stage keeps the activations of all
    micro-batches.

    Args:
        stage: this stage, from 0.
        num_stages: stages of the pipeline.
        num_micro_batches: micro-batches of one step.

    Raises:
        InvalidArgumentError: a number outside its range.
    """
    _check(stage, num_stages, num_micro_batches)
    micro_batches = range(num_micro_batches)
    return [*map(Forward, micro_batches), *map(Backward, micro_batches)]


def one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Fill the pipeline, then alternate one forward with one backward, then drain it.

    Source: PipeDream-Flush, https://arxiv.org/abs/2006.09503. Stage ``s`` keeps the activations of
    at most ``num_stages - s`` micro-batches.

    Args:
        stage: this stage, from 0.
        num_stages: stages of the pipeline.
        num_micro_batches: micro-batches of one step; may be fewer than stages.

    Raises:
        InvalidArgumentError: a number outside its range.
    """
    _check(stage, num_stages, num_micro_batches)
    ahead = min(num_stages - stage - 1, num_micro_batches)
    actions: list[Action] = [Forward(m) for m in range(ahead)]
    for m in range(ahead, num_micro_batches):
        actions += [Forward(m), Backward(m - ahead)]
    return actions + [Backward(m) for m in range(num_micro_batches - ahead, num_micro_batches)]


SCHEDULES: dict[str, Schedule] = {"afab": afab, "1f1b": one_f_one_b}


def _check(stage: int, num_stages: int, num_micro_batches: int) -> None:
    if num_stages < 1 or not 0 <= stage < num_stages:
        message = f"stage must be from 0 to num_stages - 1, got stage {stage} of {num_stages}"
        raise InvalidArgumentError(message)
    if num_micro_batches < 1:
        message = f"a schedule needs at least 1 micro-batch, got {num_micro_batches}"
        raise InvalidArgumentError(message)
