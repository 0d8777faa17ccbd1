"""Guesses that everything is a factor too large or too small, and what that factor may mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from ...compose.words import RUNS, listed
from .parts import Case, Finding, Part
from .words import has, told, who

CANDIDATES = 8  # factors that are tried
NEAR = 0.05  # relative: a factor that means something is tried if one as near fits best
EXACT = 1e-6  # how near a factor is to 1/k if it is said to be that
MOST_DIGITS = 12


def scaled(case: Case) -> Iterator[Finding]:
    """Find one factor for all elements, one that means something first."""
    known = _meanings(case)
    fits = [_factor(part) for part in case.wrong]
    near = [c for c in known if any(abs(c - fit) <= NEAR * abs(c) for fit in fits)]
    for each in list(dict.fromkeys([*near, *fits]))[:CANDIDATES]:
        holds = partial(_is_scaled, case, each, 0 if each in near else 1)
        yield from told(case, _times(each, case.bound), holds, known.get(each, ""))


def each_scaled(case: Case) -> Iterator[Finding]:
    """Find factors that differ from part to part, as where each is divided by a size of its own."""
    fits = {i: _factor(part) for i, part in enumerate(case.wrong)}
    covers = [i for i, fit in fits.items() if _is_scaled(case, fit, 1, case.wrong[i])]
    said: dict[str, list[Part]] = {}
    for i in covers:
        said.setdefault(f"{fits[i]:.4g}", []).append(case.wrong[i])
    if len(said) > 1:
        each = [f"{who(case, parts)} {factor}" for factor, parts in said.items()]
        more = ", and so on" if len(each) > RUNS else ""
        yield Finding(
            frozenset(covers),
            f"{has(who(case, [case.wrong[i] for i in covers]))} the right values times a factor of "
            f"its own ({listed(each[:RUNS])}{more}): "
            "a mean of means, or a norm of each part alone?",
        )


def _factor(part: Part) -> float:
    square = float((part.due * part.due).sum())
    return float((part.had * part.due).sum()) / square if square else 0.0


def _is_scaled(case: Case, factor: float, fitted: int, part: Part) -> bool:
    return factor != 0 and case.agrees(part.had, factor * part.due, part.due, fitted)


def _meanings(case: Case) -> dict[float, str]:
    """Return likely factors and their meaning, such as the number of ranks."""
    counts = [(len(g[0]), f"ranks of {axis}") for axis, g in case.groups.items() if len(g)]
    counts.append((len({p.piece.micro_batch for p in case.parts}), "micro-batches"))
    sizes: dict[int, list[str]] = {}
    for size, name in counts:
        sizes.setdefault(size, []).append(f"{size} {name}")
    ranks = len({p.piece.rank for p in case.parts})
    sizes.setdefault(ranks, [f"{ranks} ranks"])
    found: dict[float, str] = {}
    for size, names in sizes.items():
        if size > 1:
            there = f", and there are {listed(names)}: "
            found[float(size)] = there + "counted once each, or summed once too often?"
            found[1 / size] = there + "a mean in place of a sum, or divided once too often?"
    return found | {each: found.get(each, "") for each in (-1.0, 2.0, 0.5)}


def _times(factor: float, bound: float) -> str:
    size = abs(factor)
    if factor == -1:
        return "the right values with the sign flipped"
    for k in range(2, 65):
        if abs(size * k - 1) < EXACT:
            return f"{'-' if factor < 0 else ''}1/{k} of the right values"
    digits = min(max(1 - math.ceil(math.log10(bound)), 2), 4)
    while float(f"{size:.{digits}g}") == 1 and digits < MOST_DIGITS:
        digits += 1  # 1.000001 is not 1
    return f"{factor:.{digits}g} times the right values"
