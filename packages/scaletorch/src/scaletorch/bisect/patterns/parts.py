"""Ranks' pieces beside what they should be, and which of their elements are wrong."""

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
CLEAR = 6.0  # times its bound by which an element is off if that cannot be rounding
APART = 2.0  # times as large, where all but a few slices are wrong
CHANCE = math.log(1e-4)  # that a guess fits by accident


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank has of a tensor.

    Attributes:
        rank: Global rank.
        micro_batch: 0-based.
        tensor: The piece.
        index: For each of its dims which indices of the whole it holds, int64 [size].
    """

    rank: int
    micro_batch: int
    tensor: Tensor
    index: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece beside what it should be; everything is float64 and finite, but `raw`.

    Attributes:
        piece: Where it comes from.
        place: What its index holds, which two parts with the same index share.
        raw: Its values as they are.
        have: Its values; as `want` if either is not finite.
        want: The right values; 0 for those that are not finite.
        odd: Whether an element is not finite while the right one is, or the other way round.
        mask: Whether an element is wrong (of those that are finite).
        had: What stands in the wrong elements, 1-d.
        due: What should.
    """

    piece: Piece
    place: tuple[tuple[int, ...], ...]
    raw: Tensor
    have: Tensor
    want: Tensor
    odd: Tensor
    mask: Tensor
    had: Tensor
    due: Tensor


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


def common(gap: Tensor) -> Tensor:
    """Return the mean row [1, ..., 1, columns] of a tensor; without rows the tensor."""
    return gap if gap.ndim < 2 else gap.mean(list(range(gap.ndim - 1)), keepdim=True)


def slices(tensor: Tensor, dim: int) -> Tensor:
    """Return the slices of a dim, [its size, elements of one]."""
    return tensor.movedim(dim, 0).unsqueeze(-1).flatten(1)


def box_of(mask: Tensor) -> tuple[Tensor, ...]:
    """Return for each dim the places that have an element of a mask."""
    return tuple(slices(mask, dim).any(1).nonzero()[:, 0] for dim in range(mask.ndim))


def beside(piece: Piece, case: Case, right: Tensor) -> Part:
    """Return a piece beside its part of the right tensor, of which nothing is finite by need."""
    raw, want = plain(piece.tensor), pick(right, piece.index)
    finite = raw.isfinite() & want.isfinite()
    odd = ~finite & (raw != want) & ~(raw.isnan() & want.isnan())
    want = want.nan_to_num(0.0, 0.0, 0.0)
    have = torch.where(finite, raw, want)
    mask = _wrong(case, have - want, want)
    place = tuple(tuple(at.tolist()) for at in piece.index)
    return Part(piece, place, raw, have, want, odd, mask, have[mask], want[mask])


def _wrong(case: Case, gap: Tensor, want: Tensor) -> Tensor:
    """Return which elements are wrong; the others together are within their bound."""
    allowed = case.allowed(gap.numel(), norm(want))
    if norm(gap) <= allowed:
        return torch.zeros_like(gap, dtype=torch.bool)
    size = want.abs().clamp(min=case.allowed(1) / case.bound)
    wrong = gap.abs() > CLEAR * case.bound * size
    if norm(gap[~wrong]) <= allowed:
        return wrong
    # Many are a little wrong: all that lie between the largest, without which the rest is right.
    ordered = gap.abs().flatten().sort().values
    fine = int((ordered.square().cumsum(0).sqrt() <= allowed).sum())
    wrong = gap != 0
    for dim, at in enumerate(box_of(gap.abs() >= ordered[min(fine, len(ordered) - 1)])):
        norms = slices(gap, dim).norm(dim=1)
        if norms[at].min() >= APART * norms.index_fill(0, at, 0.0).max():
            wrong &= torch.zeros_like(wrong).index_fill(dim, at, True)
    return wrong
