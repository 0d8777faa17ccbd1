"""Guesses that slices stand in the wrong places: shifted, or in another order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...compose.words import ranges
from .parts import ROOM, Case, Finding, pick
from .words import has, plural, some, where, who

LARGEST = 2**20  # pairs of slices that are compared
WIDTH = 16  # numbers that stand for a slice while candidates are looked for
TRIED = 4  # shifts
SHOWN = 3  # runs of a new order in a sentence


class Slices(NamedTuple):
    """The wrong slices of a part along a dim, and all that the whole has beside them.

    Attributes:
        at: Which of the whole they should be, [n].
        have: [n, elements of a slice].
        want: As `have`.
        pool: All of the whole, [size of the dim, elements of a slice].
        apart: About how far each is from each of the pool; infinite if it is another, [n, size].
    """

    at: Tensor
    have: Tensor
    want: Tensor
    pool: Tensor
    apart: Tensor


def shifted(case: Case) -> Iterator[Finding]:
    """Find slices that all stand as far from their places."""
    for dim in range(case.whole.ndim):
        found: dict[int, list[int]] = {}
        for i in range(len(case.wrong)):
            for by in _shifts(case, i, dim):
                found.setdefault(by, []).append(i)
        for by, covers in found.items():
            parts = [case.wrong[i] for i in covers]
            at = parts[0].index[dim][parts[0].box[dim]]
            first = int(at[(at >= by) & (at < case.whole.shape[dim] + by)][0])
            what = f"values shifted by {abs(by)} along {plural(case, dim)}{where(case, parts)}"
            example = f"{some(case, dim, [first])} has what {first - by} should have"
            yield Finding(frozenset(covers), f"{has(who(case, parts))} {what}: {example}")


def reordered(case: Case) -> Iterator[Finding]:
    """Find slices that belong in other places: each in one of theirs, or anywhere."""
    for dim in range(case.whole.ndim):
        for permuted in (True, False):
            maps = {
                i: pairs
                for i in range(len(case.wrong))
                if (pairs := _sources(case, i, dim, permuted))
            }
            if maps:
                parts = [case.wrong[i] for i in maps]
                how = "in another order" if permuted else "that belong elsewhere"
                text = f"{has(who(case, parts))} {plural(case, dim)} {how}"
                yield Finding(
                    frozenset(maps), f"{text}: {_runs(case, dim, next(iter(maps.values())))}"
                )


def sketch(rows: Tensor) -> Tensor:
    """Return [n, at most `WIDTH`] numbers about as far apart as rows [n, elements] are."""
    size = rows.shape[1]
    if size <= WIDTH:
        return rows
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
    padded = torch.nn.functional.pad(rows * signs, (0, -size % WIDTH))
    return padded.view(len(rows), -1, WIDTH).sum(1)


def distances(have: Tensor, want: Tensor) -> Tensor:
    """Return how far each row of two matrices is from each of the other, [n, m]."""
    mode = "donot_use_mm_for_euclid_dist"  # which cancels
    return torch.cdist(have, want, compute_mode=mode)


def _slices(case: Case, i: int, dim: int) -> Slices | None:
    """Return the wrong slices of a part, or None if they are too many or nothing."""
    part = case.wrong[i]
    at, size = part.index[dim][part.box[dim]], case.whole.shape[dim]
    if not len(at) or len(at) * size > LARGEST:
        return None
    others = [torch.arange(size) if d == dim else x[part.box[d]] for d, x in enumerate(part.index)]
    have, want, pool = (
        t.movedim(dim, 0).reshape(t.shape[dim], -1)
        for t in (part.boxed(part.have), part.boxed(part.want), pick(case.whole, others))
    )
    apart = distances(sketch(have), sketch(pool))
    norms = torch.maximum(have.norm(dim=1)[:, None], pool.norm(dim=1)[None])
    room = 4 * ROOM * (norms * case.bound).clamp(min=case.allowed(have.shape[1]))
    apart = torch.where(apart <= room, apart, torch.inf)
    apart[torch.arange(len(at)), at] = torch.inf  # it is wrong in its own place
    return Slices(at, have, want, pool, apart)


def _shifts(case: Case, i: int, dim: int) -> list[int]:
    """Return by how much the wrong slices of a part are shifted."""
    slices = _slices(case, i, dim)
    if slices is None or len(slices.at) < 2:
        return []
    size, found = len(slices.pool), []
    by = (slices.at[:, None] - torch.arange(size))[slices.apart.isfinite()]
    values, counts = by.unique(return_counts=True)
    for each in values[counts.argsort(descending=True, stable=True)][:TRIED].tolist():
        source = slices.at - each
        inside = (source >= 0) & (source < size)
        have, want = slices.have[inside], slices.want[inside]
        if len(have) < 2 or 3 * len(have) < 2 * len(inside):
            continue
        if case.agrees(have, slices.pool[source[inside]], want, ways=math.log(size)):
            found.append(int(each))
    return found


def _sources(case: Case, i: int, dim: int, permuted: bool) -> list[tuple[int, int]]:
    """Return pairs of a wrong slice's place and the one it belongs in, or [] if one has none."""
    slices = _slices(case, i, dim)
    if slices is None:
        return []
    at, apart = slices.at, slices.apart
    if permuted:
        source = _one_each(apart[:, at])
        source = None if source is None else at[source]
    else:
        source = apart.argmin(1) if bool((apart.amin(1) < torch.inf).all()) else None
    ways = len(at) * math.log(len(slices.pool))
    if source is None or not case.agrees(slices.have, slices.pool[source], slices.want, ways=ways):
        return []
    return list(zip(at.tolist(), source.tolist(), strict=True))


def _one_each(apart: Tensor) -> Tensor | None:
    """Return for each row a column of its own among the nearest, or None if one finds none."""
    chosen = torch.zeros(len(apart), dtype=torch.int64)
    free = torch.zeros(apart.shape[1])
    for row in apart.isfinite().sum(1).argsort().tolist():
        column = int((apart[row] + free).argmin())
        if not apart[row, column] + free[column] < torch.inf:
            return None
        chosen[row] = column
        free[column] = torch.inf
    return chosen


def _runs(case: Case, dim: int, pairs: list[tuple[int, int]]) -> str:
    """Return 'positions 0-3 have what 4-7 should have, 4-7 what 0-3 should have'."""
    runs: list[list[tuple[int, int]]] = []
    for pair in sorted(pairs):
        last = runs[-1] if runs else []
        steps = {(pair[0] - last[-1][0], pair[1] - last[-1][1])} if last else set()
        if len(last) > 1:
            steps.add((last[1][0] - last[0][0], last[1][1] - last[0][1]))
        if len(steps) == 1 and steps <= {(1, 1), (1, 0)}:
            last.append(pair)
        else:
            runs.append([pair])
    said: list[str] = []
    for run in runs[:SHOWN]:
        here, there = [a for a, _ in run], ranges(b for _, b in run)
        verb = "have" if len(here) > 1 else "has"
        subject = ranges(here) if said else f"{some(case, dim, here)} {verb}"
        said.append(f"{subject} what {there} should have")
    return ", ".join(said) + (" ..." if len(runs) > SHOWN else "")
