"""What a stage sends and receives, derived from the actions that it runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .schedules.schedule import FORWARD, Action


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor between this stage and a neighbour.

    Attributes:
        peer: the other stage.
        gradient: whether it is the gradient of hidden states, not hidden states.
        micro_batch: which micro-batch it belongs to.
    """

    peer: int
    gradient: bool
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Step:
    """One transfer each way, completed together, and then one action.

    Attributes:
        send: what the previous action produced.
        receive: what ``action`` consumes.
        action: what to run; None where a last transfer ends the schedule.
    """

    send: Transfer | None
    receive: Transfer | None
    action: Action | None


def derive(actions: Iterable[Action], stage: int, num_stages: int) -> list[Step]:
    """Add sends and receives to a stage's actions.

    What an action produces is sent together with the receive for the next one. With 1F1B this
    makes the steady state one exchange with one neighbour at a time, which cannot deadlock even
    where a send waits for its receive.

    Args:
        actions: the stage's schedule.
        stage: this stage, from 0.
        num_stages: stages of the pipeline.
    """
    steps: list[Step] = []
    send: Transfer | None = None
    for action in actions:
        steps.append(Step(send, _consumed(action, stage, num_stages), action))
        send = _produced(action, stage, num_stages)
    return [*steps, Step(send, None, None)]


def _consumed(action: Action, stage: int, num_stages: int) -> Transfer | None:
    gradient = action.kind != FORWARD
    return _transfer(stage + 1 if gradient else stage - 1, num_stages, gradient, action)


def _produced(action: Action, stage: int, num_stages: int) -> Transfer | None:
    gradient = action.kind != FORWARD
    return _transfer(stage - 1 if gradient else stage + 1, num_stages, gradient, action)


def _transfer(peer: int, num_stages: int, gradient: bool, action: Action) -> Transfer | None:
    return Transfer(peer, gradient, action.micro_batch) if 0 <= peer < num_stages else None
