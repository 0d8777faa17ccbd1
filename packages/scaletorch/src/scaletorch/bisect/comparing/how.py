"""Describe in words how a tensor is wrong, from its own values and from related tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...compose.words import RUNS, listed, ranges
from ..keys import BACKWARD, GRADIENT, LOSS, START, TERM, WEIGHT, Key
from ..patterns import explain
from .births import SYNCHRONISATION, Birth, untied
from .judge import NEAR, Met, meet
from .places import ALIKE, GIVEN, WHOLE, Held, Way
from .runs import Run
from .whole import assemble, part_of, pieces_of

ZEROS, UNEXPLAINED = " all zeros", " values that differ"
STALE = ": does the optimizer hold other tensors than those that are trained?"
PLURAL = {"micro-batch": "es", "rank": "s"}
DROPPED = ": was that left out of the loss?"


def how(birth: Birth, run: Run, reference: Run) -> list[str]:
    """Say in which way a tensor is wrong, surest first."""
    key, bound = birth.judged.key, birth.judged.bound
    met = _met(key, run, reference)
    if met is None:
        return []
    if key.kind == GRADIENT and (names := untied(key, run, reference)):
        return [
            f"{listed(list(_named(names, key, run)))} have parts that add up to the right one: "
            "the gradients of a tied weight are not summed"
        ]
    if key.kind == WEIGHT and (start := reference.held.get(key._replace(kind=START))):
        before = assemble(pieces_of(start, met.ways), met.ways)
        moved = [replace(p, tensor=p.tensor - part_of(before, p)) for p in met.pieces]
        size = float(torch.linalg.vector_norm(met.whole))
        change = replace(met, pieces=moved, whole=met.whole - before)
        return [
            f"of its change in the step {each}" + STALE * (ZEROS in each)
            for each in _explained(key, change, bound, run, reference, size)
        ]
    said = _explained(key, met, bound, run, reference)
    if birth.direction == SYNCHRONISATION and any(UNEXPLAINED in each for each in said):
        said = list(_counted(key, met, run, reference)) or said
    if key.kind == BACKWARD and birth.modules == [LOSS]:
        return [each + DROPPED * (ZEROS in each) for each in said]
    for parent in reference.parents.get(key, ()) if key.kind == LOSS else ():
        own = parent._replace(kind=BACKWARD)
        if (back := _met(own, run, reference)) is not None and back.error > max(bound, NEAR):
            told = _explained(own, back, max(bound, NEAR), run, reference)
            said += [f"of the {own}, {each}" for each in told[:1]]
    return said


def _met(key: Key, run: Run, reference: Run) -> Met | None:
    ours, theirs = run.held.get(key), reference.held.get(key)
    return meet(ours, theirs, weighed=key.kind == BACKWARD) if ours and theirs else None


def _explained(
    key: Key, met: Met, bound: float, run: Run, reference: Run, size: float | None = None
) -> list[str]:
    groups = {
        name: [tuple(ranks) for ranks in found]
        for name, found in run.held[key][0].recording.header["groups"].items()
    }
    return explain(
        met.pieces, met.whole, bound, axes=[_word(way) for way in met.ways], groups=groups,
        others=_others(key, reference, met.whole.shape), scale=size,
    )  # fmt: skip


def _word(way: Way) -> str:
    """Return a reader's name for the indices of a dim, such as rows; '' if there is none."""
    if way.name in (ALIKE, GIVEN, WHOLE):
        return ""
    if " x " in way.name:
        return "tokens"
    return {"shares": "positions"}.get(way.name, way.name.partition(" ")[0])


def _others(key: Key, reference: Run, shape: object) -> dict[str, Tensor]:
    """Return whole tensors that one may be a stale copy of."""
    before = reference.held.get(key._replace(step=key.step - 1))
    if before is None or len(before) != 1 or before[0].tensor.shape != shape:
        return {}
    return {"the step before's": before[0].tensor}


def _named(names: Sequence[str], key: Key, run: Run) -> Iterator[str]:
    """Yield 'embed.weight on rank 0' for the names of a tied weight."""
    for name in names:
        ranks = {held.recording.rank for held in run.held[key._replace(name=name)]}
        yield f"{name} on rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def _counted(key: Key, met: Met, run: Run, reference: Run) -> Iterator[str]:
    """Say how often a gradient counts each micro-batch or rank, if not once each.

    A gradient is a sum of terms: the counts are the solution of least squares.
    """
    first = reference.steps[key.step][0].header["tied"].get(key.name, key.name)
    terms = [h for k, held in run.held.items() if k[:3] == (key.step, TERM, first) for h in held]
    for word, number in (("micro-batch", _micro_batch), ("rank", _rank)):
        owners = sorted({number(each) for each in terms})
        if len(owners) < 2:
            continue
        shares = [[each for each in terms if number(each) == owner] for owner in owners]
        added = [
            assemble(pieces_of(s, met.ways, weighed=True), met.ways, sums=True) for s in shares
        ]
        basis = torch.stack([each.flatten() for each in added], 1)
        due = _solved(basis, met.whole.flatten())
        for piece in met.pieces:
            own = torch.stack([part_of(each, piece).flatten() for each in added], 1)
            have = _solved(own, piece.tensor.flatten())
            if due is None or have is None or float((due - due[0]).abs().max()) > NEAR:
                break
            counts = [round(float(c), 4) + 0.0 for c in have / due]
            if len(set(counts)) > 1:
                yield _in_words(word, owners, counts)
                return


def _micro_batch(held: Held) -> int:
    return held.micro_batch


def _rank(held: Held) -> int:
    return held.recording.rank


def _solved(basis: Tensor, sums: Tensor) -> Tensor | None:
    """Return the coefficients of the vectors in a sum; None if they do not add up to it."""
    if len(sums) <= basis.shape[1] or torch.linalg.matrix_rank(basis) < basis.shape[1]:
        return None
    found = torch.linalg.lstsq(basis, sums.double()[:, None]).solution[:, 0]
    off = float(torch.linalg.vector_norm(basis @ found - sums))
    return found if off <= NEAR * float(torch.linalg.vector_norm(sums)) else None


def _in_words(word: str, owners: Sequence[int], counts: Sequence[float]) -> str:
    alike: dict[float, list[int]] = {}
    for owner, count in zip(owners, counts, strict=True):
        alike.setdefault(count, []).append(owner)
    said = [
        f"{count:g} times what comes of {word}{PLURAL[word] * (len(own) > 1)} {ranges(own)}"
        for count, own in alike.items()
    ]
    return f"it has {listed(said[:RUNS])}: divided, summed or left out once too often?"
