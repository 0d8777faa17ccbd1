"""Guesses about values: zeros, a copy, rounding, a bias."""

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


def biased(case: Case) -> Iterator[Finding]:
    """Find a vector that is added everywhere, or left out."""
    what = "the same vector added at every other place"
    why = ": a bias added once too often, or left out?"
    yield from told(case, what, partial(_is_biased, case), why)


def _is_biased(case: Case, part: Part) -> bool:
    if part.have.ndim < 2:
        return False
    rest = list(range(part.have.ndim - 1))
    bias = (part.have - part.want).mean(rest, keepdim=True)
    return case.agrees(part.have, part.want + bias, part.want, bias.numel())


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
