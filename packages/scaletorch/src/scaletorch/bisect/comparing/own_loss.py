"""Losses that ranks' programs went back from: each is a rank's own, a mean or a share."""

from __future__ import annotations

import torch

from ..keys import LOSS
from .places import Held
from .runs import Run

ROUGH = 0.05  # a loss so near to a multiple is meant to be that one; the bound decides if it is


def settle_losses(run: Run, reference: Run) -> None:
    """Put in the place of ranks' own losses what they come to.

    That is the mean of all ranks that have one, times a divisor of the number of ranks and
    micro-batches, or over one: they may be sums, or means that are added up later.
    """
    for key, theirs in reference.held.items():
        if key.kind != LOSS:
            continue
        right = _settle(theirs, 1.0)
        ours = run.held.get(key, [])
        if ours and all(abs(_value(each) - right) <= ROUGH * abs(right) for each in ours):
            _settle(ours, 1.0)
        elif ours:
            header, mean = ours[0].recording.header, sum(map(_value, ours)) / len(ours)
            most = int(header["world_size"] * header["micro_batches"])
            factors = [f for n in range(1, most + 1) if most % n == 0 for f in (n, 1 / n)]
            best = min(factors, key=lambda factor: abs(mean * factor - right))
            _settle(ours, best if abs(mean * best - right) <= ROUGH * abs(right) else 1.0)


def _value(held: Held) -> float:
    return float(held.tensor)


def _settle(held: list[Held], factor: float) -> float:
    """Let each be the mean times a factor, if all are ranks' own; return it."""
    mean = sum(map(_value, held)) / len(held) * factor
    if all(h.recording.header.get("own_loss") and not h.line.sums for h in held):
        for each in held:
            value = torch.full(each.line.shape, mean, dtype=each.tensor.dtype)
            each.recording.settled[each.number] = value
    return mean
