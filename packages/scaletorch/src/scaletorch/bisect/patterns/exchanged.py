"""A guess that a rank has what another should have, or it itself in another micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...compose.words import RUNS
from .parts import Case, Finding, Part
from .words import one


def exchanged(case: Case) -> Iterator[Finding]:
    """Find parts that belong to another: 'rank 1 has what rank 0 should have'."""
    found: dict[str, list[int]] = {}
    for i, part in enumerate(case.wrong):
        near = sorted(case.parts, key=lambda p: p.piece.rank != part.piece.rank)
        for other in near:
            if _is_elsewhere(other, part) and case.agrees(part.have, other.want, part.want):
                said = f"{one(case, part.piece)} has what {one(case, other.piece)} should have"
                found.setdefault(said, []).append(i)
                break
    if found:
        more = " and so on" if len(found) > RUNS else ""
        covers = frozenset(i for each in found.values() for i in each)
        yield Finding(covers, ", ".join(list(found)[:RUNS]) + more)


def _is_elsewhere(other: Part, part: Part) -> bool:
    same = all(torch.equal(a, b) for a, b in zip(part.index, other.index, strict=True))
    return other.want.shape == part.want.shape and not same
