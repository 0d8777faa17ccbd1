"""The runtime: executes one stage's schedule, whatever the schedule and the model are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from .schedules.schedule import BACKWARD, FORWARD, Action
from .transfers import Step
from .wire import Wire

Forward = Callable[[int, Tensor | None], Tensor]
Backward = Callable[[int, Tensor | None, Tensor, Tensor | None], Tensor | None]


class StageWork(Protocol):
    """What the actions of a schedule do on this stage."""

    def forward(self, micro_batch: int, hidden: Tensor | None) -> Tensor:
        """Return the stage's output, or the loss on the last stage; no ``hidden`` on the first."""

    def backward(
        self, micro_batch: int, hidden: Tensor | None, output: Tensor, gradient: Tensor | None
    ) -> Tensor | None:
        """Backpropagate and return the gradient of ``hidden``; no ``gradient`` on the last."""


def execute(
    steps: Iterable[Step], wire: Wire, forward: Forward, backward: Backward | None = None
) -> None:
    """Run a stage's steps in order; an activation is dropped as soon as its backward has run.

    Args:
        steps: what `transfers.derive` made of the stage's schedule.
        wire: how tensors travel to the neighbours.
        forward: what a forward does, as `StageWork.forward`.
        backward: what a backward does; None where the schedule has none, and nothing is kept.
    """
    live: dict[int, tuple[Tensor | None, Tensor]] = {}
    product: Tensor | None = None
    for step in steps:
        arrived = wire.swap(
            product,
            step.send.peer if step.send else None,
            step.receive.peer if step.receive else None,
        )
        product = None
        # No name here may outlive its action, or it would keep activations alive.
        match step.action:
            case Action(kind, m) if kind == FORWARD:
                if backward is not None and arrived is not None:
                    arrived.requires_grad_()
                product = forward(m, arrived)
                if backward is not None:
                    live[m] = arrived, product
            case Action(kind, m) if kind == BACKWARD and backward is not None:
                product = backward(m, *live.pop(m), arrived)
        del arrived
