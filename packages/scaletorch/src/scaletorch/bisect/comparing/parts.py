"""A wrong tensor's shards together with the right values, and words for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...compose.naming import ranges
from .places import Piece

ROOM = 2.0  # times the bound, for the rounding of a guess and of the right values
MOST = 0.3  # share of the difference that a guess may leave unexplained
HUGE = 1e140  # the square of a larger number overflows; it counts as infinite
CLEAR = 6.0  # times its bound: an element with a larger error is wrong for sure
CHANCE = math.log(1e-4)  # largest probability that a guess fits by accident
DENSE = 0.3  # if a larger share of a box is wrong, the whole box is called wrong


@dataclass(frozen=True, slots=True)
class Part:
    """A piece with its right values; everything is float64, and finite except for `raw`.

    Attributes:
        piece: The rank's piece.
        place: The values of its index; equal for pieces in the same place.
        raw: The rank's values.
        have: The rank's values; those of `want` if either is not finite.
        want: The right values; 0 for those that are not finite.
        odd: Mask of elements that are not finite while the right ones are, or the reverse.
        mask: Mask of wrong elements, among the finite ones.
        had: Values of the wrong elements, 1-d.
        due: Right values of the wrong elements, 1-d.
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
    """A wrong tensor, with everything that guesses about it are made from.

    Attributes:
        parts: The pieces of all ranks.
        wrong: The pieces that differ by more than rounding explains.
        whole: The right tensor, float64, finite.
        bound: Relative bound on the 2-norm of a difference.
        scale: The 2-norm that differences are divided by.
        axes: Names of the dims of `whole`, in the plural; "" for a dim without a name.
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
        """Return the largest 2-norm of the error of `elements` elements with values of `norms`."""
        share = self.scale * math.sqrt(elements / max(self.whole.numel(), 1))
        return self.bound * max([share, *norms])

    def agrees(
        self, have: Tensor, guess: Tensor, want: Tensor, fitted: int = 0, ways: float = 0.0
    ) -> bool:
        """Return whether a guess explains the values, and not by accident.

        Args:
            have: The rank's values.
            guess: The values by the guess, of the same shape.
            want: The right values; the guess has to explain most of the difference from them.
            fitted: Number of parameters of the guess that were fitted to the values.
            ways: Logarithm of the number of possible guesses of this kind.
        """
        each = math.log(min(max(4 * self.bound, 1e-8), 0.9))  # chance that one number fits
        if (have.numel() - fitted) * each + ways > CHANCE:
            return False
        room = ROOM * self.allowed(have.numel(), norm(want), norm(guess))
        return norm(have - guess) <= min(room, MOST * norm(have - want))


@dataclass(frozen=True, slots=True)
class Finding:
    """A guess that holds.

    Attributes:
        covers: Indices in `Case.wrong` of the pieces that it explains.
        sentence: The guess in words.
    """

    covers: frozenset[int]
    sentence: str


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor in float64 on the CPU; elements whose square overflows become infinite."""
    tensor = tensor.detach().cpu().double()
    return torch.where(tensor.abs() > HUGE, tensor.sign() * math.inf, tensor)


def norm(tensor: Tensor) -> float:
    """Return the 2-norm of all elements."""
    return float(torch.linalg.vector_norm(tensor))


def pick(tensor: Tensor, index: Sequence[Tensor]) -> Tensor:
    """Return the elements of a tensor at the given indices of each dim."""
    for dim, at in enumerate(index):
        tensor = tensor.index_select(dim, at)
    return tensor


def slices(tensor: Tensor, dim: int) -> Tensor:
    """Return the slices along a dim, flattened: [size of the dim, elements of a slice]."""
    return tensor.movedim(dim, 0).unsqueeze(-1).flatten(1)


def box_of(mask: Tensor) -> tuple[Tensor, ...]:
    """Return, for each dim, the indices whose slice has a True element of a mask."""
    return tuple(slices(mask, dim).any(1).nonzero()[:, 0] for dim in range(mask.ndim))


def beside(piece: Piece, case: Case, right: Tensor) -> Part:
    """Return a piece with its right values, taken from `right`, which may have NaN and infinity."""
    raw, want = plain(piece.tensor), pick(right, piece.index)
    finite = raw.isfinite() & want.isfinite()
    odd = ~finite & (raw != want) & ~(raw.isnan() & want.isnan())
    want = want.nan_to_num(0.0, 0.0, 0.0)
    have = torch.where(finite, raw, want)
    mask = _wrong(case, have - want, want)
    place = tuple(tuple(at.tolist()) for at in piece.index)
    return Part(piece, place, raw, have, want, odd, mask, have[mask], want[mask])


def _wrong(case: Case, gap: Tensor, want: Tensor) -> Tensor:
    """Return the mask of wrong elements; all others together are within their bound."""
    allowed = case.allowed(gap.numel(), norm(want))
    if norm(gap) <= allowed:
        return torch.zeros_like(gap, dtype=torch.bool)
    size = want.abs().clamp(min=case.allowed(1) / case.bound)
    wrong = gap.abs() > CLEAR * case.bound * size
    if norm(gap[~wrong]) <= allowed:
        return wrong
    return gap != 0  # many elements are slightly wrong


def plural(case: Case, dim: int) -> str:
    """Return the name of a dim's slices, such as 'rows'."""
    name = case.axes[dim] if dim < len(case.axes) else ""
    return name or f"slices of dim {dim}"


def some(case: Case, dim: int, numbers: Iterable[int]) -> str:
    """Return slices of a dim as words, such as 'row 3' or 'rows 0-15'."""
    name, of, tail = plural(case, dim).partition(" of ")
    return f"{numbered(name.removesuffix('s'), numbers)}{of}{tail}"


def numbered(name: str, numbers: Iterable[int]) -> str:
    """Return a name with numbers, such as 'rank 0', 'ranks 0 and 1' or 'micro-batches 0-3'."""
    numbers = set(numbers)
    ending = "es" if name.endswith("ch") else "s"
    return f"{name}{ending if len(numbers) > 1 else ''} {ranges(numbers)}"


def who(case: Case, parts: Sequence[Part]) -> str:
    """Return the ranks of parts as words, with the micro-batches unless all are meant."""
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
    """Return a subject followed by 'has' or 'have'."""
    return f"{subject} {'has' if subject.startswith(('every rank', 'rank ')) else 'have'}"


def where(case: Case, parts: Sequence[Part], masks: Sequence[Tensor] = ()) -> str:
    """Return text such as ' at positions 8-11 of rows 0-15'; '' if all elements are meant.

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
    """Yield one finding for the wrong parts that pass a test, if there are any."""
    covers = [i for i, part in enumerate(case.wrong) if test(part)]
    if covers:
        parts = [case.wrong[i] for i in covers]
        yield Finding(frozenset(covers), f"{has(who(case, parts))} {what}{where(case, parts)}")
