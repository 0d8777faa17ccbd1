"""Explanations of a wrong tensor, from its own values and from related tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ...compose.naming import listed, ranges
from ..keys import BACKWARD, GRADIENT, LOSS, START, WEIGHT, Key
from .births import Birth, untied
from .judge import NEAR, Met, meet
from .patterns import explain
from .places import ALIKE, GIVEN, WHOLE, Way, assemble, part_of, pieces_of
from .runs import Run

ZEROS = " all zeros"
STALE = ": does the optimizer hold other tensors than those that are trained?"
DROPPED = ": was that left out of the loss?"


def how(birth: Birth, run: Run, reference: Run) -> list[str]:
    """Return sentences that say in which way a tensor is wrong, surest first."""
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
        scale=size,
    )  # fmt: skip


def _word(way: Way) -> str:
    """Return the plural name of a dim's indices for a sentence, such as rows; '' for no name."""
    if way.name in (ALIKE, GIVEN, WHOLE):
        return ""
    if " x " in way.name:
        return "tokens"
    return {"shares": "positions"}.get(way.name, way.name.partition(" ")[0])


def _named(names: Sequence[str], key: Key, run: Run) -> Iterator[str]:
    """Yield text such as 'embed.weight on rank 0' for each name of a tied weight."""
    for name in names:
        ranks = {held.recording.rank for held in run.held[key._replace(name=name)]}
        yield f"{name} on rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"
