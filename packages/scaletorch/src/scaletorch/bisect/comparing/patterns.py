"""Explanations of a wrong tensor: a wrong factor, slices in other places, or a missing sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from ...compose.naming import RUNS, listed, ranges
from .parts import (
    HUGE,
    MOST,
    Case,
    Finding,
    Part,
    beside,
    box_of,
    has,
    norm,
    numbered,
    pick,
    plain,
    plural,
    slices,
    some,
    told,
    where,
    who,
)
from .places import Piece

SENTENCES = 3
FINEST = 1e-14  # smallest bound: float64 itself rounds
CANDIDATES = 8  # largest number of factors to try
NEAR = 0.05  # relative distance within which an integer, or 1/k, is tried before the fit itself
EXACT = 1e-6  # relative distance within which a factor is called 1/k
LARGEST = 2**20  # largest number of pairs of slices to compare
WIDTH = 16  # size of the random projection of slices, to find the nearest one
SHOWN = 3  # ranges of a new order to name in a sentence
BATCHES = "micro-batches"
ODD = {
    "NaN": torch.isnan,
    "infinity": torch.isinf,
    "finite values, where the right ones are not,": torch.isfinite,
}


def explain(
    pieces: Sequence[Piece],
    whole: Tensor,
    bound: float,
    *,
    axes: Sequence[str] = (),
    groups: Mapping[str, Sequence[tuple[int, ...]]] | None = None,
    scale: float | None = None,
) -> list[str]:
    """Return sentences that say in which way a wrong tensor is wrong.

    Args:
        pieces: The ranks' pieces of it; several may hold the same index.
        whole: The right tensor, of a real dtype.
        bound: The largest relative difference, in the 2-norm, that rounding explains.
        axes: Names of the slices of each dim, in the plural: 'rows', 'positions', 'heads'; '' for
            a dim without a name.
        groups: For each axis of the grid its groups of ranks, `{"tp": [(0, 1), (2, 3)]}`.
        scale: The 2-norm that differences are divided by; None for the norm of `whole`.

    Returns:
        Three sentences at most, surest first, each without a full stop; none if nothing differs.
    """
    right = plain(whole)
    finite = right.nan_to_num(0.0, 0.0, 0.0)
    bound = min(max(bound, FINEST), 1.0) if bound > 0 else FINEST
    scale = scale if scale is not None and 0 < scale < HUGE else norm(finite)
    case = Case((), (), finite, bound, scale, axes, groups or {})
    # If no piece is beyond the bound, only their sum was: then look for pieces beyond half of it.
    for each in (case, replace(case, bound=bound / 2)):
        parts = [beside(piece, each, right) for piece in pieces]
        if any(bool(p.mask.any() or p.odd.any()) for p in parts):
            break
    case = replace(case, parts=parts, wrong=[p for p in parts if bool(p.mask.any())])
    return [*_not_finite(case), *_guessed(case)][:SENTENCES]


def _guessed(case: Case) -> Iterator[str]:
    """Yield the guess that covers most pieces, then most of the rest, then what none explains."""
    left = set(range(len(case.wrong)))
    found = [finding for guess in GUESSES if left for finding in guess(case)]
    while left:
        best = max(found, key=lambda each: len(each.covers & left), default=None)
        if best is None or not best.covers & left:
            yield _unexplained(case, [case.wrong[i] for i in sorted(left)])
            return
        yield best.sentence
        left -= best.covers


def _not_finite(case: Case) -> Iterator[str]:
    """Yield the ranks that have NaN or infinity where the right tensor has not, or the reverse."""
    for kind, test in ODD.items():
        parts = [p for p in case.parts if bool((p.odd & test(p.raw)).any())]
        if parts:
            masks = [p.odd & test(p.raw) for p in parts]
            yield f"{has(who(case, parts))} {kind}{where(case, parts, masks)}"


def _unexplained(case: Case, parts: Sequence[Part]) -> str:
    """Return a sentence with the place and size of a difference, and its largest element."""
    had, due = torch.cat([p.had for p in parts]), torch.cat([p.due for p in parts])
    text = f"{has(who(case, parts))} values that differ{where(case, parts)}"
    if norm(due):
        text += f", by {norm(had - due) / norm(due):.4g} of their size"
    worst = max(parts, key=lambda p: float((p.had - p.due).abs().max()))
    most = int((worst.had - worst.due).abs().argmax())
    at = zip(worst.piece.index, worst.mask.nonzero()[most], strict=True)
    named = "".join(f"{some(case, d, [int(index[x])])}, " for d, (index, x) in enumerate(at))
    values = f"{float(worst.had[most]):.4g}, right: {float(worst.due[most]):.4g}"
    return f"{text}; most at {named}{who(case, [worst])} ({values})"


# Factors


def zeros(case: Case) -> Iterator[Finding]:
    """Find pieces that are all zeros."""
    yield from told(case, "all zeros", lambda part: not bool(part.had.any()))


def scaled(case: Case) -> Iterator[Finding]:
    """Find one factor for all elements; integers and their inverses are tried first."""
    fits = [_factor(part) for part in case.wrong]
    plain = [each for fit in fits for each in _plain_factors(fit)]
    for each in list(dict.fromkeys([*plain, *fits]))[:CANDIDATES]:
        yield from told(case, _times(each, case.bound), partial(_is_scaled, case, each))


def each_scaled(case: Case) -> Iterator[Finding]:
    """Find a different factor for each piece, e.g. because each was divided by its own size."""
    fits = {i: _factor(part) for i, part in enumerate(case.wrong)}
    covers = [i for i, fit in fits.items() if _is_scaled(case, fit, case.wrong[i])]
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


def _plain_factors(fit: float) -> list[float]:
    """Return the nearest integer and the nearest inverse of one, if they are within `NEAR`."""
    inverse = round(1 / fit) if fit else 0
    found = [float(round(fit)), 1 / inverse if inverse else 0.0]
    return [each for each in found if each not in (0.0, 1.0) and abs(each - fit) < NEAR * abs(each)]


def _is_scaled(case: Case, factor: float, part: Part) -> bool:
    return factor != 0 and case.agrees(part.had, factor * part.due, part.due, fitted=1)


def _times(factor: float, bound: float) -> str:
    size = abs(factor)
    if factor == -1:
        return "the right values with the sign flipped"
    for k in range(2, 65):
        if abs(size * k - 1) < EXACT:
            return f"{'-' if factor < 0 else ''}1/{k} of the right values"
    digits = min(max(1 - math.ceil(math.log10(bound)), 2), 4)
    while float(f"{size:.{digits}g}") == 1 and digits < 12:
        digits += 1  # 1.000001 is not 1
    return f"{factor:.{digits}g} times the right values"


# Other places


def moved(case: Case) -> Iterator[Finding]:
    """Find slices that are in the wrong places."""
    for dim in range(case.whole.ndim):
        found: dict[str, list[int]] = {}
        for i, part in enumerate(case.wrong):
            if (pairs := _sources(case, part, dim)) is not None:
                at, source = pairs.tolist()
                same = sorted(at) == sorted(source)
                what = "in another order" if same else "that belong elsewhere"
                said = f"{plural(case, dim)} {what}: {_runs(list(zip(at, source, strict=True)))}"
                found.setdefault(said, []).append(i)
        for said, covers in found.items():
            parts = [case.wrong[i] for i in covers]
            yield Finding(frozenset(covers), f"{has(who(case, parts))} {said}")


def _sources(case: Case, part: Part, dim: int) -> Tensor | None:
    """Return the indices of wrong slices and their right indices, [2, n], or None.

    Up to a third of the wrong slices may belong nowhere, e.g. after a shift over an edge.
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
    guess = pool[nearest]
    fits = (have - guess).norm(dim=1) <= MOST * (have - want).norm(dim=1)
    enough, ways = 3 * int(fits.sum()) >= 2 * len(at), len(at) * math.log(size)
    if enough and case.agrees(have[fits], guess[fits], want[fits], ways=ways):
        return torch.stack((at, nearest))[:, fits]
    return None


def _nearest(have: Tensor, pool: Tensor, at: Tensor) -> Tensor:
    """Return, for each slice of [n, elements], the nearest slice of a pool, except at its place."""
    if have.shape[1] > WIDTH:
        generator = torch.Generator().manual_seed(0)
        sketch = torch.randn(have.shape[1], WIDTH, generator=generator, dtype=have.dtype)
        have, pool = have @ sketch, pool @ sketch
    mode = "donot_use_mm_for_euclid_dist"  # matmul would lose digits by cancellation
    apart = torch.cdist(have, pool, compute_mode=mode)
    apart[torch.arange(len(at)), at] = torch.inf  # known to be wrong at its own place
    return apart.argmin(1)


def _runs(pairs: list[tuple[int, int]]) -> str:
    """Return text such as 'at 0-3 is what 4-7 should have, at 4-7 what 0-3 should have'."""
    said: list[str] = []
    for _, run in groupby(pairs, key=lambda pair: pair[0] - pair[1]):
        here, there = zip(*run, strict=True)
        verb = "" if said else " is"
        said.append(f"at {ranges(here)}{verb} what {ranges(there)} should have")
    return ", ".join(said[:SHOWN]) + (" ..." if len(said) > SHOWN else "")


# Missing sums


def sums(case: Case) -> Iterator[Finding]:
    """Find pieces of ranks, or of micro-batches, whose sum or mean is the right piece."""
    for over, clusters in _clusters(case):
        found: dict[str, list[list[int]]] = {}
        for cluster in clusters:
            parts = [case.wrong[i] for i in cluster]
            total = torch.stack([p.have for p in parts]).sum(0)
            guesses = {
                "parts that add up to the right one: a sum": total,
                "parts whose mean is the right one: a mean": total / len(parts),
            }
            for said, guess in guesses.items():
                if all(case.agrees(guess, p.want, p.have) for p in parts):
                    found.setdefault(said, []).append(cluster)
                    break
        for said, right in found.items():
            covers = frozenset(i for cluster in right for i in cluster)
            yield Finding(covers, f"{_owners(case, right, over)} {said} over {over} is missing")


def _clusters(case: Case) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield, for each axis, the lists of wrong pieces that a sum over it would add."""
    for name, groups in _axes(case).items():
        found: dict[object, list[int]] = {}
        for i, part in enumerate(case.wrong):
            group = next((at for at, g in enumerate(groups) if part.piece.rank in g), None)
            batch = None if name == BATCHES else part.piece.micro_batch
            if group is not None:
                found.setdefault((part.place, batch, group), []).append(i)
        yield name, [cluster for cluster in found.values() if len(cluster) > 1]


def _axes(case: Case) -> dict[str, list[set[int]]]:
    """Return the groups of each axis, one of all ranks, and one of each rank for micro-batches."""
    axes = {n: [set(g) for g in gs] for n, gs in case.groups.items() if any(len(g) > 1 for g in gs)}
    ranks = {p.piece.rank for p in case.parts}
    if [ranks] not in axes.values():
        axes["all ranks"] = [ranks]
    return axes | {BATCHES: [{rank} for rank in ranks]}


def _owners(case: Case, clusters: Sequence[Sequence[int]], over: str) -> str:
    """Return text such as 'ranks 0 and 1 (tp) have', or the ranks of several groups."""
    ranks = [[case.wrong[i].piece.rank for i in cluster] for cluster in clusters]
    if over == BATCHES:
        ranks = [[rank for each in ranks for rank in each]]
    groups = list(dict.fromkeys(numbered("rank", each) for each in ranks))
    more = "; and so on" if len(groups) > RUNS else ""
    return has(f"{'; '.join(groups[:RUNS])}{more} ({over})")


# If two guesses explain the same number of pieces, the first of this list is chosen: it leaves less
# to chance, or says more. A mean in place of a sum is 1/n of the right values, and n of them also
# add up to these. Pieces that add up may be zeros if another rank's are not (a sharded embedding).
GUESSES: Sequence[Callable[[Case], Iterator[Finding]]] = (
    scaled, each_scaled, sums, zeros, moved,
)  # fmt: skip
