"""Guesses about each element by itself: zeros, a copy, rounding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from .parts import ROOM, Case, Finding, Part, norm, pick
from .words import told

ROUNDINGS = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


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
        yield from told(case, what, partial(_is_noise_of, case, dtype))


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


def _is_noise_of(case: Case, dtype: torch.dtype, part: Part) -> bool:
    have, want = part.have.flatten(), part.want.flatten()
    gap, typical = have - want, 0.2 * torch.finfo(dtype).eps * norm(want)
    if typical <= 4 * case.allowed(len(have), norm(want)):  # nobody could tell
        return False
    if not 0.3 < norm(gap) / max(typical, 1e-300) < 4 or int(part.mask.sum()) * 2 < len(gap):
        return False
    even = float(gap.abs().max()) <= 10 * norm(gap) / len(gap) ** 0.5
    return len(gap) >= 16 and even and abs(float(gap @ want)) <= 0.3 * norm(gap) * norm(want)
