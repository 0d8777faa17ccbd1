"""How a tensor that is known to be wrong is wrong: the guesses that hold, surest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .exchanged import exchanged
from .factors import each_scaled, scaled
from .moved import reordered, shifted
from .parts import FINEST, HUGE, Case, Finding, Part, Piece, beside, misfit, norm, plain, same_index
from .sums import sums
from .values import biased, copies, rounded, zeros
from .words import has, number, one, rank_list, some, where, who

SENTENCES = 3
UNRELATED = 64  # elements from which on a cosine near zero says something

# Of two that explain as many parts the first is said: it leaves less to chance, or says more. A
# mean in place of a sum is 1/n of the right one, and n of it add up. Parts that add up may be zeros
# where another rank's are not (a sharded embedding). Halves in the wrong order are shifted too.
GUESSES: Sequence[Callable[[Case], Iterator[Finding]]] = (
    exchanged,
    copies,
    scaled,
    each_scaled,
    sums,
    zeros,
    rounded,
    shifted,
    reordered,
)
# This fits much, so it is asked only if those do not explain everything.
LOOSE: Sequence[Callable[[Case], Iterator[Finding]]] = (biased,)


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
    if whole.is_complex() or any(p.tensor.is_complex() for p in pieces):
        pieces, whole, others = _real(pieces, whole, others or {})
    strangers: dict[str, list[Piece]] = {}
    for piece in pieces:
        strangers.setdefault(misfit(piece, whole), []).append(piece)
    case = _case(strangers.pop("", []), whole, bound, scale)
    said = [f"{has(rank_list(p.rank for p in ps))} {why}" for why, ps in strangers.items()]
    same = {name: t for name, t in (others or {}).items() if t.shape == case.whole.shape}
    finite = {name: plain(t).nan_to_num(0.0, 0.0, 0.0) for name, t in same.items()}
    case = replace(case, axes=axes, groups=groups or {}, others=finite)
    said += [*_not_finite(case), *_guessed(case)]
    return (said or list(_missing(case)))[:SENTENCES]


def _case(pieces: Sequence[Piece], whole: Tensor, bound: float, scale: float | None) -> Case:
    right = plain(whole)
    finite = right.nan_to_num(0.0, 0.0, 0.0)
    bound = min(max(bound, FINEST), 1.0) if bound > 0 else FINEST
    scale = scale if scale is not None and 0 < scale < HUGE else norm(finite)
    case = Case((), (), finite, bound, scale, (), {}, {})
    parts = [beside(piece, case, right) for piece in pieces]
    wrong = [p for p in parts if bool(p.mask.any())]
    if not wrong and not any(bool(p.odd.any()) for p in parts):
        # No part is beyond its bound, but together they were: then a part beyond half of it.
        parts = [beside(piece, replace(case, bound=bound / 2), right) for piece in pieces]
        wrong = [p for p in parts if bool(p.mask.any())]
    return replace(case, parts=parts, wrong=wrong)


def _guessed(case: Case) -> list[str]:
    """Say what explains most parts, then what explains most of the others, then what is left."""
    if not case.wrong:
        return []
    found = [finding for guess in GUESSES for finding in guess(case)]
    said, left = _most(case, found)
    if left:
        found += [finding for guess in LOOSE for finding in guess(case)]
        said, left = _most(case, found)
    if left:
        said.append(_unexplained(case, [case.wrong[i] for i in sorted(left)]))
    return said


def _most(case: Case, found: Sequence[Finding]) -> tuple[list[str], set[int]]:
    """Return sentences that together explain most parts, and the parts that they do not explain."""
    said: list[str] = []
    left = set(range(len(case.wrong)))
    while left and len(said) < SENTENCES:
        best = max(found, key=lambda each: len(each.covers & left), default=None)
        if best is None or not best.covers & left:
            break
        said.append(best.sentence)
        left -= best.covers
    return said, left


def _not_finite(case: Case) -> Iterator[str]:
    """Say who has NaN or infinity that the right tensor has not, or the other way round."""
    kinds: dict[str, Callable[[Part], Tensor]] = {
        "NaN": lambda p: p.odd & p.raw.isnan(),
        "infinity": lambda p: p.odd & p.raw.isinf(),
        "finite values, where the right ones are not,": lambda p: p.odd & p.raw.isfinite(),
    }
    for kind, marks in kinds.items():
        parts = [p for p in case.parts if bool(marks(p).any())]
        if parts:
            masks = [marks(p) for p in parts]
            count, total = sum(int(m.sum()) for m in masks), sum(m.numel() for m in masks)
            much = "all" if count == total else f"{count} of {total}"
            place = where(case, parts, masks)
            yield f"{has(who(case, parts))} {kind} in {much} elements{place}"


def _unexplained(case: Case, parts: Sequence[Part]) -> str:
    """Say where parts differ, by how much, and the largest difference."""
    had, due = torch.cat([p.had for p in parts]), torch.cat([p.due for p in parts])
    text = f"{has(who(case, parts))} values that differ{where(case, parts)}"
    if norm(due):
        text += f", by {number(norm(had - due) / norm(due))} of their size"
    if len(had) >= UNRELATED and norm(due) and norm(had):
        cosine = float(had @ due) / norm(had) / norm(due)
        if abs(cosine) < 3 / len(had) ** 0.5:
            text += f", and have nothing in common with the right ones (cosine {cosine:.2f})"
    text += _replicas(case, parts)
    worst = max(parts, key=lambda p: float((p.had - p.due).abs().max()))
    most = int((worst.had - worst.due).abs().argmax())
    place = [int(at[x]) for at, x in zip(worst.index, worst.mask.nonzero()[most], strict=True)]
    named = "".join(f"{some(case, d, [at])}, " for d, at in enumerate(place))
    values = f"{number(float(worst.had[most]))}, right: {number(float(worst.due[most]))}"
    return f"{text}; most at {named}{one(case, worst.piece)} ({values})"


def _replicas(case: Case, parts: Sequence[Part]) -> str:
    """Say whether ranks that hold the same indices have the same values, or '' if none do."""
    first: dict[tuple[int, int], Part] = {}
    pairs = []
    for index, part in zip(same_index(parts), parts, strict=True):
        key = index, part.piece.micro_batch
        if first.setdefault(key, part) is not part:
            pairs.append((first[key], part))
    if not pairs:
        return ""
    same = all(
        norm(a.have - b.have) <= case.allowed(a.have.numel(), norm(a.have)) for a, b in pairs
    )
    return f", {'the same' if same else 'and not the same'} on all ranks with that part"


def _missing(case: Case) -> Iterator[str]:
    """Say which slices of the whole no rank has."""
    for dim, size in enumerate(case.whole.shape):
        held = torch.zeros(size, dtype=torch.bool)
        for part in case.parts:
            held[part.index[dim]] = True
        if case.parts and not held.all():
            yield f"no rank has {some(case, dim, (~held).nonzero()[:, 0].tolist())}"


def _real(
    pieces: Sequence[Piece], whole: Tensor, others: Mapping[str, Tensor]
) -> tuple[list[Piece], Tensor, dict[str, Tensor]]:
    """Return complex tensors with a last dim for real and imaginary parts."""

    def pairs(tensor: Tensor) -> Tensor:
        return torch.view_as_real(tensor.detach().to(torch.complex128).resolve_conj())

    both = torch.arange(2)
    return (
        [replace(p, tensor=pairs(p.tensor), index=(*p.index, both)) for p in pieces],
        pairs(whole),
        {name: pairs(other) for name, other in others.items()},
    )
