"""Weights of ranks' losses and gradients in the global ones, if the program does not say them.

Ranks call backward on a mean or on a share of the global loss. DDP and FSDP2 average gradients over
ranks, so some programs multiply the loss by the number of ranks. Gradients of activations are then
larger by that factor, and those of parameters are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..keys import BACKWARD, LOSS, Key
from .judge import NEAR
from .places import Held, assemble, part_of, pieces_of, ways
from .runs import Run

ROUGH = 0.05  # relative distance within which a loss is taken for a multiple; the bound judges it


def settle_losses(run: Run, reference: Run) -> None:
    """Replace ranks' own losses by the global loss that they amount to.

    That is their mean over ranks, times or over a divisor of ranks x micro-batches: they may be
    sums, or means that are added up later.
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
    """Return the mean of losses times a factor; if all are ranks' own, set each to that."""
    mean = sum(map(_value, held)) / len(held) * factor
    if all(h.recording.header.get("own_loss") and not h.line.sums for h in held):
        for each in held:
            value = torch.full(each.line.shape, mean, dtype=each.tensor.dtype)
            each.recording.settled[each.number] = value
    return mean


OFF = 1e-6  # a loss with a smaller relative error counts as right here


def settle_weight(run: Run, reference: Run) -> None:
    """Note the factor by which all gradients of activations differ, as `Description.weight`.

    It is found from the gradient nearest to the loss, as an integer or its inverse, the same on all
    ranks. Nothing is noted if the loss itself is wrong, if all ranks describe their weights, or if
    no rank has described axes, i.e. a shard of the batch.
    """
    for step, recordings in run.steps.items():
        said = all(each.header["weight"] is not None for each in recordings)
        alike = not any(each.header["axes"] for each in recordings)
        shared = (k for k in reference.held if k.step == step and k.kind == BACKWARD)
        first = next((key for key in shared if key in run.held), None)
        if first is None or said or alike or not _loss_is_right(run, reference, step):
            continue
        for recording in recordings:
            recording.header["weight"] = 1 / _factor(first, run, reference)


def _loss_is_right(run: Run, reference: Run, step: int) -> bool:
    both = [(run.held.get(k, []), held) for k, held in reference.held.items() if k.kind == LOSS]
    return all(
        abs(ours.tensor.double() / theirs[0].tensor.double() - 1) <= OFF
        for found, theirs in both
        for ours in found
        if ours.recording.header["step"] == step == theirs[0].recording.header["step"]
    )


def _factor(key: Key, run: Run, reference: Run) -> float:
    """Return the integer factor, or its inverse, by which all shards differ; 1 if there is none."""
    ours, theirs = run.held[key], reference.held[key]
    for way in ways([*theirs, *ours]):
        whole = assemble(pieces_of(theirs, way), way)
        pieces = [p for p in pieces_of(ours, way) if p.tensor.any()]  # zeros have no factor
        found = {_multiple(p.tensor, part_of(whole, p)) for p in pieces} - {1.0}
        if len(found) == 1 and (factor := found.pop()) is not None:
            return factor
    return 1.0


def _multiple(ours: Tensor, theirs: Tensor) -> float | None:
    """Return `ours` over `theirs` if it is an integer or its inverse, else None; 1 for zeros."""
    ours, theirs = ours.double(), theirs.double()
    size = torch.linalg.vector_norm(theirs)
    if not size:
        return None if ours.any() else 1.0
    ratio = float((ours * theirs).sum() / size**2)
    whole = float(max(round(ratio), 1) if ratio > 1 else 1 / max(round(1 / max(ratio, NEAR)), 1))
    off = torch.linalg.vector_norm(ours - whole * theirs)
    return whole if off <= NEAR * whole * size else None
