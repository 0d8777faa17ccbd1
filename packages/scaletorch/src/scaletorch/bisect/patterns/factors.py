"""Guesses that everything is a factor too large or too small, and what that factor may mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import combinations

from ...compose.words import RUNS, listed
from .parts import Case, Finding, Part
from .words import has, number, told, who

CANDIDATES = 8  # factors that are tried
NEAR = 0.05  # relative: a factor that means something is tried if one as near fits best
EXACT = 1e-6  # how near a factor is to 1/k if it is said to be that
MOST_DIGITS = 12


def scaled(case: Case) -> Iterator[Finding]:
    """Find one factor for all elements, one that means something first."""
    known = _sizes(case)
    fits = [_factor(part) for part in case.wrong]
    exact = [c for n in known for c in (float(n), 1 / n)] + [-1.0, 2.0, 0.5]
    near = [c for c in exact if any(abs(c - fit) <= NEAR * abs(c) for fit in fits)]
    for each in list(dict.fromkeys([*near, *fits]))[:CANDIDATES]:
        holds = partial(_is_scaled, case, each, 0 if each in near else 1)
        yield from told(case, _times(each, case.bound), holds, _meaning(each, known))


def each_scaled(case: Case) -> Iterator[Finding]:
    """Find factors that differ from part to part, as where each is divided by a size of its own."""
    factors = {i: _factor(part) for i, part in enumerate(case.wrong)}
    covers = [i for i, f in factors.items() if _is_scaled(case, f, 1, case.wrong[i])]
    if len(covers) < 2:
        return
    said: dict[str, list[Part]] = {}
    for i in covers:
        said.setdefault(number(factors[i]), []).append(case.wrong[i])
    if len(said) > 1:
        each = [f"{who(case, parts)} {factor}" for factor, parts in said.items()]
        more = ", and so on" if len(each) > RUNS else ""
        parts = [case.wrong[i] for i in covers]
        yield Finding(
            frozenset(covers),
            f"{has(who(case, parts))} the right values times a factor of its own "
            f"({listed(each[:RUNS])}{more}): divided by a count or a norm of its own part alone?",
        )


def _factor(part: Part) -> float:
    square = float((part.due * part.due).sum())
    return float((part.had * part.due).sum()) / square if square else 0.0


def _is_scaled(case: Case, factor: float, fitted: int, part: Part) -> bool:
    return factor != 0 and case.agrees(part.had, factor * part.due, part.due, fitted)


def _sizes(case: Case) -> dict[int, list[str]]:
    """Return who there is how many of: 'tp has 2 ranks', of two axes, of all, micro-batches."""
    axes = {axis: len(groups[0]) for axis, groups in case.groups.items() if len(groups)}
    found: dict[int, list[str]] = {}
    for size in set(axes.values()):
        named = [axis for axis in axes if axes[axis] == size]
        several = len(named) > 1
        each = f"{listed(named)} {'have' if several else 'has'} {size} ranks"
        found[size] = [each + (" each" if several else "")]
    batches = len({p.piece.micro_batch for p in case.parts})
    found.setdefault(batches, []).append(f"there are {batches} micro-batches")
    for a, b in combinations(axes, 2):
        product = axes[a] * axes[b]
        found.setdefault(product, [f"{a} and {b} together have {product} ranks"])
    ranks = len({p.piece.rank for p in case.parts})
    found.setdefault(ranks, [f"there are {ranks} ranks"])
    return {size: names for size, names in found.items() if size > 1}


def _times(factor: float, bound: float) -> str:
    sign, size = "-" if factor < 0 else "", abs(factor)
    if factor == -1:
        return "the right values with the sign flipped"
    if any(abs(size * k - 1) < EXACT for k in range(2, 65)):
        return f"{sign}1/{round(1 / size)} of the right values"
    digits = min(max(1 - math.ceil(math.log10(bound)), 2), 4)
    while float(f"{size:.{digits}g}") == 1 and digits < MOST_DIGITS:
        digits += 1  # 1.000001 is not 1
    return f"{factor:.{digits}g} times the right values"


def _meaning(factor: float, sizes: dict[int, list[str]]) -> str:
    for size, names in sizes.items():
        if factor == size:
            return f", and {listed(names)}: counted once each, or summed once too often?"
        if factor == 1 / size:
            return f", and {listed(names)}: a mean in place of a sum, or divided once too often?"
    return ""
