"""How a tensor that is known to be wrong is wrong: the guesses that hold, surest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .factors import each_scaled, scaled
from .moved import exchanged, moved
from .parts import FINEST, HUGE, Case, Finding, Part, Piece, beside, norm, plain
from .sums import sums
from .values import biased, copies, rounded, zeros
from .words import has, some, where, who

SENTENCES = 3
UNRELATED = 64  # elements from which on a cosine near zero says something
ODD = {
    "NaN": torch.isnan,
    "infinity": torch.isinf,
    "finite values, where the right ones are not,": torch.isfinite,
}

# Of two that explain as many parts the first is said: it leaves less to chance, or says more. A
# mean in place of a sum is 1/n of the right one, and n of it add up. Parts that add up may be zeros
# where another rank's are not (a sharded embedding). A bias fits much.
GUESSES: Sequence[Callable[[Case], Iterator[Finding]]] = (
    exchanged,
    copies,
    scaled,
    each_scaled,
    sums,
    zeros,
    rounded,
    moved,
    biased,
)


def explain(
    pieces: Sequence[Piece],
    whole: Tensor,
    bound: float,
    *,
    axes: Sequence[str] = (),
    groups: Mapping[str, Sequence[tuple[int, ...]]] | None = None,
    others: Mapping[str, Tensor] | None = None,
    scale: float | None = None,
) -> list[str]:
    """Say how a tensor that is known to be wrong is wrong.

    Args:
        pieces: What the ranks have of it; several may hold the same index.
        whole: The right tensor, of any dtype.
        bound: The largest relative difference, of the 2-norm, that rounding explains.
        axes: What the slices of each dim are called, in the plural: 'rows', 'positions', 'heads';
            '' for a dim without a name.
        groups: For each axis of the grid its groups of ranks, `{"tp": [(0, 1), (2, 3)]}`.
        others: Whole tensors of other times it might be a copy of, by words that say whose:
            `{"micro-batch 0's": ...}`.
        scale: 2-norm by which differences are measured; None for the norm of `whole`.

    Returns:
        Three sentences at most, surest first, each without a full stop; none if nothing differs.
    """
    others = others or {}
    if whole.is_complex() or any(p.tensor.is_complex() for p in pieces):
        both = torch.arange(2)
        pieces = [replace(p, tensor=_real(p.tensor), index=(*p.index, both)) for p in pieces]
        whole, others = _real(whole), {name: _real(other) for name, other in others.items()}
    right = plain(whole)
    finite = right.nan_to_num(0.0, 0.0, 0.0)
    bound = min(max(bound, FINEST), 1.0) if bound > 0 else FINEST
    scale = scale if scale is not None and 0 < scale < HUGE else norm(finite)
    same = {
        name: plain(other).nan_to_num(0.0, 0.0, 0.0)
        for name, other in others.items()
        if other.shape == whole.shape
    }
    case = Case((), (), finite, bound, scale, axes, groups or {}, same)
    # If no part is beyond its bound, together they were: then a part beyond half of it.
    for each in (case, replace(case, bound=bound / 2)):
        parts = [beside(piece, each, right) for piece in pieces]
        if any(bool(p.mask.any() or p.odd.any()) for p in parts):
            break
    case = replace(case, parts=parts, wrong=[p for p in parts if bool(p.mask.any())])
    return [*_not_finite(case), *_guessed(case)][:SENTENCES]


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor [..., 2] of real and imaginary parts."""
    return torch.view_as_real(tensor.detach().to(torch.complex128).resolve_conj())


def _guessed(case: Case) -> Iterator[str]:
    """Say what explains most parts, then what explains most of the others, then what is left."""
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
    """Say who has NaN or infinity that the right tensor has not, or the other way round."""
    for kind, test in ODD.items():
        parts = [p for p in case.parts if bool((p.odd & test(p.raw)).any())]
        if parts:
            masks = [p.odd & test(p.raw) for p in parts]
            yield f"{has(who(case, parts))} {kind}{where(case, parts, masks)}"


def _unexplained(case: Case, parts: Sequence[Part]) -> str:
    """Say where parts differ, by how much, and the largest difference."""
    had, due = torch.cat([p.had for p in parts]), torch.cat([p.due for p in parts])
    text = f"{has(who(case, parts))} values that differ{where(case, parts)}"
    if norm(due):
        text += f", by {norm(had - due) / norm(due):.4g} of their size"
    if len(had) >= UNRELATED and norm(due) and norm(had):
        cosine = float(had @ due) / norm(had) / norm(due)
        if abs(cosine) < 3 / len(had) ** 0.5:
            text += f", and have nothing in common with the right ones (cosine {cosine:.2f})"
    if _are_alike(case, parts):
        text += ", the same on all ranks with that part"
    worst = max(parts, key=lambda p: float((p.had - p.due).abs().max()))
    most = int((worst.had - worst.due).abs().argmax())
    at = zip(worst.piece.index, worst.mask.nonzero()[most], strict=True)
    named = "".join(f"{some(case, d, [int(index[x])])}, " for d, (index, x) in enumerate(at))
    values = f"{float(worst.had[most]):.4g}, right: {float(worst.due[most]):.4g}"
    return f"{text}; most at {named}{who(case, [worst])} ({values})"


def _are_alike(case: Case, parts: Sequence[Part]) -> bool:
    """Return whether there are parts of the same place, and all those are the same."""
    first: dict[object, Part] = {}
    pairs = [(first.setdefault((p.place, p.piece.micro_batch), p), p) for p in parts]
    return len(first) < len(parts) and all(
        norm(a.have - b.have) <= case.allowed(a.have.numel(), norm(a.have)) for a, b in pairs
    )
