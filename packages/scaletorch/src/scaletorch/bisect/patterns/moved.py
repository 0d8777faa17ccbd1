"""Guesses that values stand in the wrong places: another's part, shifted, or in another order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from ...compose.words import RUNS, ranges
from .parts import Case, Finding, Part, box_of, pick, slices
from .words import has, plural, where, who

LARGEST = 2**20  # pairs of slices that are compared
WIDTH = 16  # numbers that stand for a slice while the nearest is looked for
SHOWN = 3  # runs of a new order in a sentence


def exchanged(case: Case) -> Iterator[Finding]:
    """Find parts of another rank or micro-batch: 'rank 1 has what rank 0 should have'."""
    found: dict[str, list[int]] = {}
    for i, part in enumerate(case.wrong):
        for other in sorted(case.parts, key=lambda p: p.piece.rank != part.piece.rank):
            fits = other.want.shape == part.want.shape and other.place != part.place
            if fits and case.agrees(part.have, other.want, part.want):
                said = f"{who(case, [part])} has what {who(case, [other])} should have"
                found.setdefault(said, []).append(i)
                break
    if found:
        more = " and so on" if len(found) > RUNS else ""
        covers = frozenset(i for each in found.values() for i in each)
        yield Finding(covers, ", ".join(list(found)[:RUNS]) + more)


def moved(case: Case) -> Iterator[Finding]:
    """Find slices that all stand as far from their places, or each belong in another place."""
    for dim in range(case.whole.ndim):
        found: dict[int, dict[int, Tensor]] = {}
        for i, part in enumerate(case.wrong):
            if (pairs := _sources(case, part, dim)) is not None:
                steps = (pairs[0] - pairs[1]).unique()
                by = int(steps) if len(steps) == 1 and pairs.shape[1] > 1 else 0
                found.setdefault(by, {})[i] = pairs
        for by, each in found.items():
            parts = [case.wrong[i] for i in each]
            at, source = next(iter(each.values())).tolist()
            same = sorted(at) == sorted(source)
            what = f"{plural(case, dim)} {'in another order' if same else 'that belong elsewhere'}"
            if by:
                what = f"values shifted by {abs(by)} along {plural(case, dim)}{where(case, parts)}"
                at = at[:1]
            said = _runs(list(zip(at, source, strict=False)))
            yield Finding(frozenset(each), f"{has(who(case, parts))} {what}: {said}")


def _sources(case: Case, part: Part, dim: int) -> Tensor | None:
    """Return the places [2, n] of wrong slices and those they belong in, or None if one has none.

    If most are shifted by as much, these alone: what is shifted over an edge comes from elsewhere.
    """
    box = box_of(part.mask)
    at, size = part.piece.index[dim][box[dim]], case.whole.shape[dim]
    if len(at) * size > LARGEST:
        return None
    others = [x[here] for x, here in zip(part.piece.index, box, strict=True)]
    others[dim] = torch.arange(size)
    have, want = (slices(pick(each, box), dim) for each in (part.have, part.want))
    pool = slices(pick(case.whole, others), dim)
    nearest = _nearest(have, pool, at)
    shifted = at - (at - nearest).mode().values
    for source, numbers in ((shifted, 1), (nearest, len(at))):
        inside = (source >= 0) & (source < size)
        guess, ways = pool[source[inside]], numbers * math.log(size)
        enough = 3 * int(inside.sum()) >= 2 * len(at)
        if enough and case.agrees(have[inside], guess, want[inside], ways=ways):
            return torch.stack((at, source))[:, inside]
    return None


def _nearest(have: Tensor, pool: Tensor, at: Tensor) -> Tensor:
    """Return for each slice [n, elements] the nearest of a pool, but that of its own place [n]."""
    if have.shape[1] > WIDTH:
        generator = torch.Generator().manual_seed(0)
        sketch = torch.randn(have.shape[1], WIDTH, generator=generator, dtype=have.dtype)
        have, pool = have @ sketch, pool @ sketch
    mode = "donot_use_mm_for_euclid_dist"  # which cancels
    apart = torch.cdist(have, pool, compute_mode=mode)
    apart[torch.arange(len(at)), at] = torch.inf  # it is wrong there
    return apart.argmin(1)


def _runs(pairs: list[tuple[int, int]]) -> str:
    """Return 'at 0-3 is what 4-7 should have, at 4-7 what 0-3 should have'."""
    said: list[str] = []
    for _, run in groupby(pairs, key=lambda pair: pair[0] - pair[1]):
        here, there = zip(*run, strict=True)
        verb = "" if said else " is"
        said.append(f"at {ranges(here)}{verb} what {ranges(there)} should have")
    return ", ".join(said[:SHOWN]) + (" ..." if len(said) > SHOWN else "")
