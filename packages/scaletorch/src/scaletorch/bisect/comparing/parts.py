"""A wrong tensor as its ranks have it, beside what it should be; its parts in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...compose.naming import ranges
from .places import Piece

ROOM = 2.0  # times the bound that a guess may miss by: its own rounding, and that of the right one
MOST = 0.3  # of the difference that a guess may leave unexplained
HUGE = 1e140  # what is larger has no square, and counts as infinite
CLEAR = 6.0  # times its bound by which an element is off if that cannot be rounding
CHANCE = math.log(1e-4)  # that a guess fits by accident
DENSE = 0.3  # of the elements of a box wrong: then the whole box is said to be


@dataclass(frozen=True, slots=True)
class Part:
    """A piece beside what it should be; everything is float64 and finite, but `raw`.

    Attributes:
        piece: Where it comes from.
        place: The values of its index, which two parts of the same place share.
        raw: Its values as they are.
        have: Its values; as `want` if either is not finite.
        want: The right values; 0 for those that are not finite.
        odd: Whether an element is not finite while the right one is, or the other way round.
        mask: Whether an element is wrong (of those that are finite).
        had: Values of the wrong elements, 1-d.
        due: The right values of these.
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
    """

    parts: Sequence[Part]
    wrong: Sequence[Part]
    whole: Tensor
    bound: float
    scale: float
    axes: Sequence[str]
    groups: Mapping[str, Sequence[tuple[int, ...]]]

    def allowed(self, elements: int, *norms: float) -> float:
        """Return how far so many elements may be off, given the 2-norms of their values."""
        share = self.scale * math.sqrt(elements / max(self.whole.numel(), 1))
        return self.bound * max([share, *norms])

    def agrees(
        self, have: Tensor, guess: Tensor, want: Tensor, fitted: int = 0, ways: float = 0.0
    ) -> bool:
        """Return whether a guess explains the values, and not by accident.

        Args:
            have: The values.
            guess: What they would be, of the same shape.
            want: What they should be; the guess has to explain most of the difference.
            fitted: How many numbers of the guess were fitted to the values.
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
    """Return the elements of a tensor at an index for each dim."""
    for dim, at in enumerate(index):
        tensor = tensor.index_select(dim, at)
    return tensor


def slices(tensor: Tensor, dim: int) -> Tensor:
    """Return the slices of a dim, [its size, elements of one]."""
    return tensor.movedim(dim, 0).unsqueeze(-1).flatten(1)


def box_of(mask: Tensor) -> tuple[Tensor, ...]:
    """Return for each dim the indices that have an element of a mask."""
    return tuple(slices(mask, dim).any(1).nonzero()[:, 0] for dim in range(mask.ndim))


def beside(piece: Piece, case: Case, right: Tensor) -> Part:
    """Return a piece beside its part of the right tensor, which may have NaN and infinity."""
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
    return gap != 0  # many are a little wrong


def plural(case: Case, dim: int) -> str:
    """Return the name of the slices of a dim: 'rows'."""
    name = case.axes[dim] if dim < len(case.axes) else ""
    return name or f"slices of dim {dim}"


def some(case: Case, dim: int, numbers: Iterable[int]) -> str:
    """Return 'row 3' or 'rows 0-15'."""
    name, of, tail = plural(case, dim).partition(" of ")
    return f"{numbered(name.removesuffix('s'), numbers)}{of}{tail}"


def numbered(name: str, numbers: Iterable[int]) -> str:
    """Return 'rank 0', 'ranks 0 and 1' or 'micro-batches 0-3'."""
    numbers = set(numbers)
    ending = "es" if name.endswith("ch") else "s"
    return f"{name}{ending if len(numbers) > 1 else ''} {ranges(numbers)}"


def who(case: Case, parts: Sequence[Part]) -> str:
    """Return the ranks that have parts, and the micro-batches if not all of theirs: 'rank 1'."""
    held, meant = (
        {(p.piece.rank, p.piece.micro_batch) for p in each} for each in (case.parts, parts)
    )
    ranks, every = {rank for rank, _ in meant}, {rank for rank, _ in held}
    said = "every rank" if ranks == every and len(every) > 1 else numbered("rank", ranks)
    theirs = {(rank, batch) for rank, batch in held if rank in ranks}
    if meant == theirs:
        return said
    batches = {batch for _, batch in meant}
    if meant == {(rank, batch) for rank, batch in theirs if batch in batches}:
        return f"{said} ({numbered('micro-batch', batches)})"
    return f"{said} (not in all micro-batches)"


def has(subject: str) -> str:
    """Return a subject with its 'has' or 'have'."""
    return f"{subject} {'has' if subject.startswith(('every rank', 'rank ')) else 'have'}"


def where(case: Case, parts: Sequence[Part], masks: Sequence[Tensor] = ()) -> str:
    """Return ' at positions 8-11 of rows 0-15', or '' if all of the whole or of several parts.

    The masks select elements of each part; without masks the wrong elements are selected.
    """
    masks = masks or [p.mask for p in parts]
    boxes = [box_of(mask) for mask in masks]
    volumes = [math.prod(map(len, box)) for box in boxes]
    total = sum(p.have.numel() for p in parts)
    said = []
    for dim in reversed(range(case.whole.ndim)):
        pairs = zip(parts, boxes, strict=True)
        at = torch.cat([p.piece.index[dim][box[dim]] for p, box in pairs]).unique()
        if len(at) < case.whole.shape[dim] and (len(parts) == 1 or sum(volumes) < total):
            said.append(some(case, dim, at.tolist()))
    place, count = " of ".join(said), sum(int(mask.sum()) for mask in masks)
    if count > DENSE * sum(volumes):
        return f" at {place}" if place else ""
    return f" at {count} of {total} elements" + (f" ({place})" if place else "")


def told(case: Case, what: str, test: Callable[[Part], bool]) -> Iterator[Finding]:
    """Yield a finding of the wrong parts that pass a test, if there are any."""
    covers = [i for i, part in enumerate(case.wrong) if test(part)]
    if covers:
        parts = [case.wrong[i] for i in covers]
        yield Finding(frozenset(covers), f"{has(who(case, parts))} {what}{where(case, parts)}")
