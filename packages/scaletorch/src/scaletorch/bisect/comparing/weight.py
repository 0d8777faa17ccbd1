"""What each rank's loss counts in the whole one, where a program does not say it.

DDP and FSDP2 average gradients over ranks, so programs multiply the loss by the number of ranks:
gradients of activations are as many times the whole's, and those of parameters are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..keys import BACKWARD, LOSS, Key
from .judge import NEAR
from .places import ways
from .runs import Run
from .whole import assemble, part_of, pieces_of

OFF = 1e-6  # by which a loss may differ that is taken for right here


def settle_weight(run: Run, reference: Run) -> None:
    """Note, as `Description.weight`, by what number all gradients of activations differ.

    It is read off the gradient nearest to the loss: the same on all ranks, a whole number or one
    over such. Nothing is noted if the loss itself is wrong, if ranks say it, or if no rank says
    that it has a part of the batch.
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
    """Return what whole number, or one over such, all parts are of the reference's; else 1."""
    ours, theirs = run.held[key], reference.held[key]
    for way in ways([*theirs, *ours]):
        whole = assemble(pieces_of(theirs, way), way)
        pieces = [p for p in pieces_of(ours, way) if p.tensor.any()]  # what was dropped is none
        found = {_multiple(p.tensor, part_of(whole, p)) for p in pieces} - {1.0}
        if len(found) == 1 and (factor := found.pop()) is not None:
            return factor
    return 1.0


def _multiple(ours: Tensor, theirs: Tensor) -> float | None:
    """Return what number a tensor is of another; 1 if both are zero, None if it is of no such."""
    ours, theirs = (torch.view_as_real(x) if x.is_complex() else x for x in (ours, theirs))
    ours, theirs = ours.double(), theirs.double()
    size = torch.linalg.vector_norm(theirs)
    if not size:
        return None if ours.any() else 1.0
    ratio = float((ours * theirs).sum() / size**2)
    whole = float(max(round(ratio), 1) if ratio > 1 else 1 / max(round(1 / max(ratio, NEAR)), 1))
    off = torch.linalg.vector_norm(ours - whole * theirs)
    return whole if off <= NEAR * whole * size else None
