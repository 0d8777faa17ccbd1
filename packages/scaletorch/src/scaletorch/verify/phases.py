"""The optimizers of a proof, each of which trains several steps, so that its state counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

LEARNING_RATE = 0.1
ADAM_EPS = 1e-2  # large: a small one turns rounding of tiny gradients into whole steps
MAX_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps in a row that one optimizer makes.

    Attributes:
        steps: How many.
        make: Returns the optimizer of parameters.
        clips: Whether gradients are clipped to `MAX_NORM` first.
    """

    steps: int
    make: Callable[[Iterable[Any]], Optimizer]
    clips: bool


# Unclipped SGD first: Adam and clipping hide scale errors. The first step of each is its plain
# form, the second needs the moments of the first.
PHASES = (
    Phase(2, partial(torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9), clips=False),
    Phase(2, partial(torch.optim.AdamW, lr=LEARNING_RATE / 10, eps=ADAM_EPS), clips=True),
)
STEPS = sum(phase.steps for phase in PHASES)


def phase_at(step: int) -> tuple[Phase, bool]:
    """Return the phase of a step, 0-based, and whether the step is its first."""
    for phase in PHASES:
        if step < phase.steps:
            return phase, step == 0
        step -= phase.steps
    raise IndexError(f"step {step} is beyond the {STEPS} steps of a proof")
