"""Losses that ranks' programs went back from: each is a rank's own, a mean or a share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..keys import LOSS
from .places import Held
from .runs import Run

ROUGH = 0.05  # so near to a multiple a loss is meant to be that one; if it is, others decide


@dataclass(frozen=True, slots=True)
class Told(Held):
    """A loss as it counts in the whole: what its rank's own comes to."""

    value: Tensor

    @property
    def tensor(self) -> Tensor:
        """What the ranks' losses come to."""
        return self.value


def settle_losses(run: Run, reference: Run) -> None:
    """Put in the place of ranks' own losses what they come to.

    That is the mean of all ranks that have one, times a divisor of the number of ranks or of
    micro-batches, or over one: sums, and means of what is added up or averaged later. Nothing is
    replaced if each is the reference's.
    """
    for key, held in run.held.items():
        if key.kind != LOSS or key not in reference.held or any(e.line.sums for e in held):
            continue
        whole = _mean(reference.held[key])
        if any(e.recording.header.get("own_loss") for e in reference.held[key]):
            reference.held[key] = [_told(e, whole) for e in reference.held[key]]
        if not all(e.recording.header.get("own_loss") for e in held):
            continue
        mean, right = _mean(held), float(whole)
        if any(abs(float(e.tensor) - right) > ROUGH * abs(right) for e in held):
            most = _most(held)
            divisors = [n for n in range(1, most + 1) if most % n == 0]
            factors = [factor for n in divisors for factor in (n, 1 / n)]
            best = min(factors, key=lambda factor: abs(float(mean) * factor - right))
            mean *= best if abs(float(mean) * best - right) <= ROUGH * abs(right) else 1.0
        run.held[key] = [_told(e, mean) for e in held]


def _most(held: list[Held]) -> int:
    header = held[0].recording.header
    return int(header["world_size"] * header["micro_batches"])


def _mean(held: list[Held]) -> Tensor:
    return torch.stack([each.tensor.double().reshape(()) for each in held]).mean()


def _told(held: Held, value: Tensor) -> Any:
    tensor = value.to(held.tensor.dtype).reshape(held.line.shape)
    return Told(held.recording, held.number, held.micro_batch, tensor)
