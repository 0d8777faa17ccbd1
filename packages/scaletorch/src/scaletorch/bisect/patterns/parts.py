"""Ranks' pieces beside what they should be, and where in them the difference lies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROOM = 2.0  # times the bound that a guess may miss by: its own rounding, and that of the right one
MOST = 0.3  # of the difference that a guess may leave unexplained
FINEST = 1e-14  # bound below which float64 itself rounds
HUGE = 1e140  # what is larger has no square, and counts as infinite
CLEAR = 4.0  # times as large squares, where all but a few slices are wrong
CHANCE = math.log(1e-4)  # that a guess fits by accident


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank has of a tensor.

    Attributes:
        rank: Global rank.
        micro_batch: 0-based.
        tensor: The piece.
        index: For each of its dims which indices of the whole it holds, int64 [size]; those outside
            of the whole are padding.
    """

    rank: int
    micro_batch: int
    tensor: Tensor
    index: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece without padding, beside what it should be; everything is float64 and finite.

    Attributes:
        piece: Where it comes from.
        index: For each dim which indices of the whole.
        raw: Its values as they are.
        have: Its values; as `want` if either is not finite.
        want: The right values; 0 for those that are not finite.
        odd: Whether an element is not finite while the right one is, or the other way round.
        mask: Whether an element is wrong (of those that are finite).
        had: What stands in the wrong elements, 1-d.
        due: What should.
        box: For each dim the places in the piece between which all wrong elements lie.
    """

    piece: Piece
    index: tuple[Tensor, ...]
    raw: Tensor
    have: Tensor
    want: Tensor
    odd: Tensor
    mask: Tensor
    had: Tensor
    due: Tensor
    box: tuple[Tensor, ...]

    def boxed(self, tensor: Tensor) -> Tensor:
        """Return what a tensor of the piece's shape holds in the box."""
        return pick(tensor, self.box)


@dataclass(frozen=True, slots=True)
class Case:
    """A wrong tensor: all that the guesses about it are made from.

    Attributes:
        parts: Of all ranks.
        wrong: Those that differ by more than rounding explains.
        whole: The right tensor, float64, finite.
        bound: Relative, of the 2-norm.
        scale: 2-norm by which differences are measured.
        axes: Names of the whole's dims, in the plural; "" for a dim without a name.
        groups: For each axis of the grid its groups of ranks.
        others: Whole tensors it might be a copy of, float64, of the whole's shape.
    """

    parts: Sequence[Part]
    wrong: Sequence[Part]
    whole: Tensor
    bound: float
    scale: float
    axes: Sequence[str]
    groups: Mapping[str, Sequence[tuple[int, ...]]]
    others: Mapping[str, Tensor]

    def allowed(self, elements: int, *norms: float) -> float:
        """Return how far so many elements may be off, given the 2-norms of what they hold."""
        share = self.scale * math.sqrt(elements / max(self.whole.numel(), 1))
        return self.bound * max([share, *norms])

    def agrees(
        self, have: Tensor, guess: Tensor, want: Tensor, fitted: int = 0, ways: float = 0.0
    ) -> bool:
        """Return whether a guess comes to what is there, and is no accident.

        Args:
            have: What is there.
            guess: What would be there, of the same shape.
            want: What should be there; the guess has to explain most of the difference.
            fitted: How many numbers of the guess were fitted to what is there.
            ways: Logarithm of how many guesses of this kind were possible.
        """
        each = math.log(min(max(4 * self.bound, 1e-8), 0.9))  # of one number
        if (have.numel() - fitted) * each + ways > CHANCE:
            return False
        room = ROOM * self.allowed(have.numel(), norm(want), norm(guess))
        return norm(have - guess) <= min(room, MOST * norm(have - want))


@dataclass(frozen=True, slots=True)
class Finding:
    """A guess that holds.

    Attributes:
        covers: Which of the wrong parts it explains, by their places in `Case.wrong`.
        sentence: In words.
    """

    covers: frozenset[int]
    sentence: str


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, infinite where its square would be."""
    tensor = tensor.detach().cpu().double()
    return torch.where(tensor.abs() > HUGE, tensor.sign() * math.inf, tensor)


def norm(tensor: Tensor) -> float:
    """Return the 2-norm of all elements."""
    return float(torch.linalg.vector_norm(tensor))


def pick(tensor: Tensor, index: Sequence[Tensor]) -> Tensor:
    """Return what a tensor holds at an index for each dim."""
    for dim, at in enumerate(index):
        if len(at) != tensor.shape[dim] or not at.equal(torch.arange(len(at))):
            tensor = tensor.index_select(dim, at)
    return tensor


def misfit(piece: Piece, whole: Tensor) -> str:
    """Return in words why a piece cannot be a part of the whole, or ''."""
    shape, named = list(piece.tensor.shape), [at.numel() for at in piece.index]
    if shape == named and len(shape) == whole.ndim:
        return ""
    return f"shape {shape}, where its part of the right one, {list(whole.shape)}, has {named}"


def beside(piece: Piece, case: Case, right: Tensor) -> Part:
    """Return a piece beside its part of the right tensor, of which nothing is finite by need."""
    ats = [at.detach().cpu().long().flatten() for at in piece.index]
    inside = [
        ((at >= 0) & (at < size)).nonzero()[:, 0] for at, size in zip(ats, right.shape, strict=True)
    ]
    index = tuple(at[kept] for at, kept in zip(ats, inside, strict=True))
    raw, want = pick(plain(piece.tensor), inside), pick(right, index)
    finite = raw.isfinite() & want.isfinite()
    odd = ~finite & (raw != want) & ~(raw.isnan() & want.isnan())
    want = want.nan_to_num(0.0, 0.0, 0.0)
    have = torch.where(finite, raw, want)
    mask, box = _wrong(case, have, want)
    return Part(piece, index, raw, have, want, odd, mask, have[mask], want[mask], box)


def box_of(mask: Tensor) -> tuple[Tensor, ...]:
    """Return for each dim the places that have an element of a mask."""
    return tuple(_any(mask, dim).nonzero()[:, 0] for dim in range(mask.ndim))


def same_index(parts: Sequence[Part]) -> list[int]:
    """Return for each part a number that those with the same index share."""
    found: list[tuple[Tensor, ...]] = []
    numbers = []
    for part in parts:
        for number, index in enumerate(found):
            if all(torch.equal(a, b) for a, b in zip(index, part.index, strict=True)):
                numbers.append(number)
                break
        else:
            numbers.append(len(found))
            found.append(part.index)
    return numbers


def _any(mask: Tensor, dim: int) -> Tensor:
    """Return for each place of a dim whether an element of a mask is there."""
    rest = [d for d in range(mask.ndim) if d != dim]
    return mask.any(rest) if rest else mask


def _wrong(case: Case, have: Tensor, want: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return which elements are wrong, and the slices of each dim between which they lie."""
    gap, allowed = have - want, case.allowed(have.numel(), norm(want))
    mask = torch.zeros_like(gap, dtype=torch.bool)
    if norm(gap) <= allowed:
        return mask, box_of(mask)
    box = _box(case, gap, want, allowed)
    inside = torch.ones_like(mask)
    for dim, at in enumerate(box):
        inside &= torch.zeros_like(mask).index_fill(dim, at, True)
    mask = (_excess(case, gap.square(), want.square(), 1) > 1) & inside
    if norm(gap[~mask]) > allowed:  # much of it is a little everywhere
        mask = (gap != 0) & inside
    return mask, box


def _box(case: Case, gap: Tensor, want: Tensor, allowed: float) -> tuple[Tensor, ...]:
    """Return the slices of each dim that differ too much, if without them nothing does.

    The dim that narrows it down most goes first: in the rest the others are seen more clearly.
    """
    box = [torch.arange(size) for size in gap.shape]
    dims = set(range(gap.ndim))
    while dims:
        found = {}
        inner, right = pick(gap, box).square(), pick(want, box).square()
        for dim in dims:
            rest = [d for d in range(gap.ndim) if d != dim]
            energy = inner.sum(rest) if rest else inner
            size = right.sum(rest) if rest else right
            excess = _excess(case, energy, size, inner.numel() // len(energy))
            bad = excess > 1
            if bad.any() and math.sqrt(float(energy[~bad].sum())) <= allowed and _clear(excess):
                found[dim] = bad
        if not found:
            break
        best = min(found, key=lambda dim: float(found[dim].double().mean()))
        box[best] = box[best][found[best]]
        dims.remove(best)
    return tuple(box)


def _clear(excess: Tensor) -> bool:
    """Return whether the few slices that are no worse than rounding do not just happen to be."""
    bad = excess > 1
    if bool(bad.all()) or 2 * int(bad.sum()) <= len(bad):
        return True
    return float(excess[bad].min()) >= CLEAR * float(excess[~bad].max())


def _excess(case: Case, energy: Tensor, want: Tensor, count: int) -> Tensor:
    """Return how many times slices of `count` elements exceed their share of rounding, squared."""
    room = case.bound * (1 + 5 / math.sqrt(count))
    share = case.scale**2 * count / max(case.whole.numel(), 1)
    allowed = room**2 * want.clamp(min=share)
    return torch.where(energy > 0, energy / allowed.clamp(min=1e-300), 0.0)
