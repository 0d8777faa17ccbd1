"""Guesses about each element by itself: zeros, a factor, a copy, rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from .parts import ROOM, Case, Finding, Part, norm, pick
from .words import has, listed, where, who

ROUNDINGS = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
CANDIDATES = 8  # factors that are tried
EXACT = 1e-6  # how near a factor is to 1/k if it is said to be that


def zeros(case: Case) -> Iterator[Finding]:
    """Find zeros, exact ones first, and values where zeros should be."""
    yield from told(case, "all zeros", lambda p: not bool(p.had.any()))
    yield from told(
        case,
        "nothing but rounding errors around zero",
        lambda p: case.agrees(p.had, torch.zeros_like(p.due), p.due),
    )
    yield from told(
        case,
        "values other than the zeros that are right",
        lambda p: not bool(p.due.any()),
    )


def masks(case: Case) -> Iterator[Finding]:
    """Find zeros in other places than those of the right tensor."""
    yield from told(
        case,
        "zeros in other places than the right ones (another mask?)",
        lambda p: not bool((p.have * p.want)[p.mask].any()),
    )


def scaled(case: Case) -> Iterator[Finding]:
    """Find one factor for all elements: surely if it means something, else if enough fit."""
    known = _sizes(case)
    fits = [_factor(p.had, p.due) for p in case.wrong]
    exact = [c for n in known for c in (float(n), 1 / n)] + [-1.0, 2.0, 0.5]
    tried = [c for c in dict.fromkeys(exact) if any(abs(c - fit) <= 0.05 * abs(c) for fit in fits)]
    for factor in [*tried, *dict.fromkeys(fits)][:CANDIDATES]:
        test = partial(_is_scaled, case, factor, 0 if factor in tried else 1)
        yield from told(case, _times(factor, case.bound), test, _meaning(factor, known))


def copies(case: Case) -> Iterator[Finding]:
    """Find values of another tensor, in place of the right ones or added to them."""
    for name, other in case.others.items():
        yield from told(case, f"{name} values (a stale copy?)", partial(_is_copy, case, other))
        what = f"{name} values added to the right ones (not cleared?)"
        yield from told(case, what, partial(_is_on_top, case, other))


def rounded(case: Case) -> Iterator[Finding]:
    """Find values that a shorter dtype has, off by no more than it rounds."""
    for name, dtype in ROUNDINGS.items():
        yield from told(case, f"values rounded to {name}", partial(_is_rounded, case, dtype))


def rounded_inside(case: Case) -> Iterator[Finding]:
    """Find differences as large as a dtype's rounding, spread evenly."""
    for name, dtype in ROUNDINGS.items():
        what = f"differences everywhere as large as {name} rounds: computed in {name}?"
        yield from told(case, what, partial(_is_noise_of, dtype))


def told(case: Case, what: str, test: Callable[[Part], bool], why: str = "") -> Iterator[Finding]:
    """Yield what the wrong parts that pass a test have, if any does, and why that may be."""
    covers = [i for i, part in enumerate(case.wrong) if test(part)]
    if covers:
        parts = [case.wrong[i] for i in covers]
        text = f"{has(who(case, parts))} {what}{where(case, parts)}{why}"
        yield Finding(frozenset(covers), text)


def _factor(have: Tensor, want: Tensor) -> float:
    square = float((want * want).sum())
    return float((have * want).sum()) / square if square else 0.0


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
    return f"{factor:.{4 if bound < 1e-4 else 2}g} times the right values"


def _meaning(factor: float, sizes: dict[int, list[str]]) -> str:
    for size, names in sizes.items():
        if factor == size:
            return f", and {listed(names)}: counted once each, or summed once too often?"
        if factor == 1 / size:
            return f", and {listed(names)}: a mean in place of a sum, or divided once too often?"
    return ""


def _is_scaled(case: Case, factor: float, fitted: int, part: Part) -> bool:
    return factor != 0 and case.agrees(part.had, factor * part.due, part.due, fitted)


def _is_copy(case: Case, other: Tensor, part: Part) -> bool:
    return case.agrees(part.had, pick(other, part.index)[part.mask], part.due)


def _is_on_top(case: Case, other: Tensor, part: Part) -> bool:
    return case.agrees(part.had, part.due + pick(other, part.index)[part.mask], part.due)


def _is_rounded(case: Case, dtype: torch.dtype, part: Part) -> bool:
    have, want = part.had, part.due
    rounds = torch.finfo(dtype)
    if not have.to(dtype).double().equal(have) or want.to(dtype).double().equal(want):
        return False
    room = rounds.eps * want.abs() + rounds.tiny + 6 * ROOM * case.allowed(1)
    return bool(((have - want).abs() <= room).all()) and norm(have - want) <= rounds.eps * norm(
        want
    )


def _is_noise_of(dtype: torch.dtype, part: Part) -> bool:
    have, want = part.have.flatten(), part.want.flatten()
    gap, typical = have - want, 0.2 * torch.finfo(dtype).eps * norm(want)
    if not 0.3 < norm(gap) / max(typical, 1e-300) < 4 or int(part.mask.sum()) * 2 < len(gap):
        return False
    even = float(gap.abs().max()) <= 10 * norm(gap) / len(gap) ** 0.5
    return len(gap) >= 16 and even and abs(float(gap @ want)) <= 0.3 * norm(gap) * norm(want)
