"""The optimizers of a proof, each of which trains several steps, so that its state counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from ..dist.building import Locator

LEARNING_RATE = 0.1
ADAM_EPS = 1e-2  # large: a small one turns rounding of tiny gradients into whole steps
MAX_NORM = 1.0
STEPS = 4


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps in a row that the same optimizers make.

    Attributes:
        steps: How many.
        make: Returns the optimizers of parameters.
        clips: Whether gradients are clipped to `MAX_NORM` first.
    """

    steps: int
    make: Callable[[Iterable[Any]], Sequence[Optimizer]]
    clips: bool


@dataclass(frozen=True, slots=True)
class Alone:
    """Makes one optimizer of all parameters.

    Attributes:
        kind: Its class.
        options: What it is made with.
    """

    kind: Callable[..., Optimizer]
    options: Mapping[str, Any]

    def __call__(self, parameters: Iterable[Any]) -> list[Optimizer]:
        """Return it in a list."""
        return [self.kind(list(parameters), **self.options)]


_adamw = Alone(torch.optim.AdamW, {"lr": LEARNING_RATE / 10, "eps": ADAM_EPS})

# Unclipped SGD first: Adam and clipping hide scale errors. The first step of each is its plain
# form, the second needs the moments of the first.
PHASES = (
    Phase(2, Alone(torch.optim.SGD, {"lr": LEARNING_RATE, "momentum": 0.9}), clips=False),
    Phase(2, _adamw, clips=True),
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Makes a program's own optimizer of all parameters, or of the matrices if it takes no others.

    Then AdamW has the rest, as with Muon.

    Attributes:
        kind: Its class, or a function of parameters.
        options: What it is made with.
    """

    kind: Locator
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, parameters: Iterable[Any]) -> list[Optimizer]:
        """Return the optimizers of parameters."""
        every = list(parameters)
        make = partial(self.kind.find(), **self.options)
        try:
            return [make(every)]
        except ValueError:
            matrices = [each for each in every if each.ndim == 2]
            rest = [each for each in every if each.ndim != 2]
            if not matrices or not rest:
                raise
            return [make(matrices), *_adamw(rest)]


def phases_of(chosen: Chosen) -> tuple[Phase, ...]:
    """Return the phases of a proof with an optimizer of the program's own."""
    return (Phase(STEPS, chosen, clips=False),)


def phase_at(step: int, phases: Sequence[Phase] = PHASES) -> tuple[Phase, bool]:
    """Return the phase of a step, 0-based, and whether the step is its first."""
    for phase in phases:
        if step < phase.steps:
            return phase, step == 0
        step -= phase.steps
    raise IndexError(f"step {step} is beyond the {STEPS} steps of a proof")
