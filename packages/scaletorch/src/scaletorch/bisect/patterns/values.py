"""Guesses about values: zeros, a copy, rounding, a bias."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from .parts import Case, Finding, Part, common, norm, pick
from .words import told

ROUNDINGS = (torch.float32, torch.float16, torch.bfloat16)


def zeros(case: Case) -> Iterator[Finding]:
    """Find zeros, exact ones first."""
    yield from told(case, "all zeros", lambda p: not bool(p.had.any()))
    near = partial(_is_copy, case, torch.zeros_like(case.whole), 0)
    yield from told(case, "nothing but rounding errors around zero", near)


def copies(case: Case) -> Iterator[Finding]:
    """Find values of another tensor, in place of the right ones or added to them."""
    for name, other in case.others.items():
        stale, added = (partial(_is_copy, case, other, times) for times in (0, 1))
        yield from told(case, f"{name} values (a stale copy?)", stale)
        yield from told(case, f"{name} values added to the right ones (not cleared?)", added)


def rounded(case: Case) -> Iterator[Finding]:
    """Find values that a shorter dtype has, off by no more than it rounds."""
    for dtype in ROUNDINGS:
        name = str(dtype).removeprefix("torch.")
        yield from told(case, f"values rounded to {name}", partial(_is_rounded, dtype))


def biased(case: Case) -> Iterator[Finding]:
    """Find a vector that is added everywhere, or left out."""
    what, why = "the same vector added", ": a bias added once too often, or left out?"
    yield from told(case, what, partial(_is_biased, case), why)


def _is_biased(case: Case, part: Part) -> bool:
    bias = common(part.have - part.want)
    return case.agrees(part.have, part.want + bias, part.want, bias.numel())


def _is_copy(case: Case, other: Tensor, times: int, part: Part) -> bool:
    """Return whether a part has another tensor's values, added to so many times the right ones."""
    copy = pick(other, part.piece.index)[part.mask]
    return case.agrees(part.had, times * part.due + copy, part.due)


def _is_rounded(dtype: torch.dtype, part: Part) -> bool:
    had_fits, due_fits = (each.to(dtype).double().equal(each) for each in (part.had, part.due))
    close = norm(part.had - part.due) <= torch.finfo(dtype).eps * norm(part.due)
    return had_fits and not due_fits and close
