"""Guesses with a number for each slice: a factor or a term that is the same along other dims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from ...compose.words import listed
from .parts import Case, Finding, Part
from .words import has, number, plural, single, where, who

DIMS = 5  # more than these are not tried

Fit = Callable[[Tensor, Tensor, list[int]], tuple[Tensor, Tensor]]


def fitted(case: Case) -> Iterator[Finding]:
    """Find terms and factors that vary along few dims, those along the fewest first."""
    if case.whole.ndim > DIMS:
        return
    for count in range(case.whole.ndim):
        for dims in combinations(range(case.whole.ndim), count):
            yield from _tried(case, dims, _term, _added)
            if dims:
                yield from _tried(case, dims, _factor, _multiplied)


def _tried(
    case: Case, dims: tuple[int, ...], fit: Fit, worded: Callable[..., str]
) -> Iterator[Finding]:
    covers, numbers = [], []
    for i, part in enumerate(case.wrong):
        have, want = part.boxed(part.have), part.boxed(part.want)
        rest = [d for d in range(have.ndim) if d not in dims]
        if any(have.shape[d] < 2 for d in dims) or all(have.shape[d] < 2 for d in rest):
            continue
        guess, fitted = fit(have, want, rest)
        if case.agrees(have, guess, want, fitted.numel()):
            covers.append(i)
            numbers.append(fitted.flatten())
    if covers:
        parts = [case.wrong[i] for i in covers]
        what = worded(case, parts, dims, torch.cat(numbers))
        yield Finding(frozenset(covers), what)


def _term(have: Tensor, want: Tensor, rest: list[int]) -> tuple[Tensor, Tensor]:
    term = (have - want).mean(rest, keepdim=True)
    return want + term, term


def _factor(have: Tensor, want: Tensor, rest: list[int]) -> tuple[Tensor, Tensor]:
    square = (want * want).sum(rest, keepdim=True)
    factor = (have * want).sum(rest, keepdim=True) / torch.where(square == 0, 1.0, square)
    return factor * want, factor


def _added(case: Case, parts: Sequence[Part], dims: tuple[int, ...], terms: Tensor) -> str:
    subject, place = has(who(case, parts)), where(case, parts)
    if not dims:
        same = float(terms.max() - terms.min()) <= 1e-3 * float(terms.abs().max())
        value = f" ({number(float(terms.mean()))})" if same else ""
        return f"{subject} the same number{value} added to every element{place}"
    every = listed([single(case, d) for d in _long(parts, dims)])
    if dims == (case.whole.ndim - 1,):
        return (
            f"{subject} the same vector added at every {every}{place}: "
            "a bias added once too often, or left out?"
        )
    along = listed([plural(case, d) for d in dims])
    return f"{subject} the same term (it varies along {along} alone) added at every {every}{place}"


def _multiplied(case: Case, parts: Sequence[Part], dims: tuple[int, ...], factors: Tensor) -> str:
    each = " of each ".join(single(case, d) for d in reversed(dims))
    low, high = number(float(factors.min())), number(float(factors.max()))
    hint = ": a norm or softmax over a part alone?" if case.whole.ndim - 1 not in dims else ""
    return (
        f"{has(who(case, parts))} the right values of each {each} times a factor of its own "
        f"({low} to {high}){where(case, parts)}{hint}"
    )


def _long(parts: Sequence[Part], dims: tuple[int, ...]) -> list[int]:
    """Return the other dims along which there is more than one slice."""
    ndim = parts[0].have.ndim
    return [d for d in range(ndim) if d not in dims and any(len(p.box[d]) > 1 for p in parts)]
