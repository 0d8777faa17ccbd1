"""Shards of a wrong tensor with their right values, and names of ranks and places."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...compose.naming import ranges
from .places import Piece, norm

ROOM = 2.0  # times the bound, for the rounding of a guess and of the right values
UNEXPLAINED = 0.3  # fraction of the difference that a guess may leave
HUGE = 1e140  # the square of a larger number overflows; it counts as infinite
CLEAR = 6.0  # times its bound: an element with a larger error is wrong for sure
CHANCE = math.log(1e-4)  # largest probability that a guess fits by accident


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's piece with its right values; everything is float64 and finite."""

    piece: Piece
    have: Tensor  # the rank's values; those of `want` if either is not finite
    want: Tensor  # the right values; 0 for those that are not finite
    odd: Tensor  # mask of elements that are not finite while the right ones are, or the reverse
    mask: Tensor  # mask of wrong elements, among the finite ones
    had: Tensor  # values of the wrong elements, 1-d
    due: Tensor  # right values of the wrong elements, 1-d


@dataclass(frozen=True, slots=True)
class Case:
    """A wrong tensor, with all data that guesses need."""

    shards: Sequence[Shard]  # the pieces of all ranks
    wrong: Sequence[Shard]  # the pieces that differ by more than rounding explains
    whole: Tensor  # the right tensor, float64, finite
    bound: float  # relative bound on the 2-norm of a difference
    scale: float  # the 2-norm that differences are divided by
    axes: Sequence[str]  # names of the dims of `whole`, in the plural; "" for a dim without a name
    groups: Mapping[str, Sequence[tuple[int, ...]]]  # for each axis of the grid its groups of ranks

    def allowed(self, elements: int, *norms: float) -> float:
        """Return the largest 2-norm of the error of `elements` elements with values of `norms`."""
        share = self.scale * math.sqrt(elements / max(self.whole.numel(), 1))
        return self.bound * max([share, *norms])

    def agrees(
        self, have: Tensor, guess: Tensor, want: Tensor, fitted: int = 0, choices: float = 0.0
    ) -> bool:
        """Return whether a guess explains the values, and not by accident.

        `fitted` is the number of parameters of the guess that were fitted to the values;
        `choices` is the logarithm of the number of possible guesses of this kind.
        """
        one = math.log(min(max(4 * self.bound, 1e-8), 0.9))  # chance that one number fits
        if (have.numel() - fitted) * one + choices > CHANCE:
            return False
        room = ROOM * self.allowed(have.numel(), norm(want), norm(guess))
        return norm(have - guess) <= min(room, UNEXPLAINED * norm(have - want))

    def shard_of(self, piece: Piece, right: Tensor) -> Shard:
        """Return a piece with its values in `right`, which may have NaN and infinity."""
        raw, want = plain(piece.tensor), pick(right, piece.index)
        finite = raw.isfinite() & want.isfinite()
        odd = ~finite & (raw != want) & ~(raw.isnan() & want.isnan())
        want = want.nan_to_num(0.0, 0.0, 0.0)
        have = torch.where(finite, raw, want)
        mask = self._wrong(have - want, want)
        return Shard(piece, have, want, odd, mask, have[mask], want[mask])

    def _wrong(self, gap: Tensor, want: Tensor) -> Tensor:
        """Return the mask of wrong elements; all others together are within their bound."""
        allowed = self.allowed(gap.numel(), norm(want))
        if norm(gap) <= allowed:
            return torch.zeros_like(gap, dtype=torch.bool)
        size = want.abs().clamp(min=self.allowed(1) / self.bound)
        wrong = gap.abs() > CLEAR * self.bound * size
        return wrong if norm(gap[~wrong]) <= allowed else gap != 0  # many are slightly wrong

    def plural(self, dim: int) -> str:
        """Return the name of a dim's slices, such as 'rows'."""
        name = self.axes[dim] if dim < len(self.axes) else ""
        return name or f"slices of dim {dim}"

    def ranks_of(self, shards: Sequence[Shard]) -> str:
        """Return the ranks of shards as words, with the micro-batches unless all are meant."""
        held, chosen = (
            {(each.piece.rank, each.piece.micro_batch) for each in several}
            for several in (self.shards, shards)
        )
        ranks, every = {rank for rank, _ in chosen}, {rank for rank, _ in held}
        text = "every rank" if ranks == every and len(every) > 1 else numbered("rank", ranks)
        if chosen == {(rank, batch) for rank, batch in held if rank in ranks}:
            return text
        return f"{text} ({numbered('micro-batch', {batch for _, batch in chosen})})"

    def where(self, shards: Sequence[Shard], masks: Sequence[Tensor] = ()) -> str:
        """Return text such as ' at positions 8-11 of rows 0-15'; '' if all elements are meant."""
        boxes = [box_of(mask) for mask in masks or [shard.mask for shard in shards]]
        named = sum(math.prod(map(len, box)) for box in boxes)
        whole = named == sum(shard.have.numel() for shard in shards)
        texts = []
        for dim in reversed(range(self.whole.ndim)):
            pairs = zip(shards, boxes, strict=True)
            place = torch.cat([shard.piece.index[dim][box[dim]] for shard, box in pairs]).unique()
            if len(place) < self.whole.shape[dim] and (len(shards) == 1 or not whole):
                name, separator, tail = self.plural(dim).partition(" of ")
                texts.append(f"{numbered(name.removesuffix('s'), place.tolist())}{separator}{tail}")
        return f" at {' of '.join(texts)}" if texts else ""


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor in float64 on the CPU; elements whose square overflows become infinite."""
    tensor = tensor.detach().cpu().double()
    return torch.where(tensor.abs() > HUGE, tensor.sign() * math.inf, tensor)


def pick(tensor: Tensor, index: Sequence[Tensor]) -> Tensor:
    """Return the elements of a tensor at the given indices of each dim."""
    for dim, indices in enumerate(index):
        tensor = tensor.index_select(dim, indices)
    return tensor


def slices(tensor: Tensor, dim: int) -> Tensor:
    """Return the slices along a dim, flattened: [size of the dim, elements of a slice]."""
    return tensor.movedim(dim, 0).unsqueeze(-1).flatten(1)


def box_of(mask: Tensor) -> tuple[Tensor, ...]:
    """Return, for each dim, the indices whose slice has a True element of a mask."""
    return tuple(slices(mask, dim).any(1).nonzero()[:, 0] for dim in range(mask.ndim))


def numbered(name: str, numbers: Iterable[int]) -> str:
    """Return a name with numbers, such as 'rank 0', 'ranks 0 and 1' or 'micro-batches 0-3'."""
    numbers = set(numbers)
    ending = "es" if name.endswith("ch") else "s"
    return f"{name}{ending if len(numbers) > 1 else ''} {ranges(numbers)}"


def has(subject: str) -> str:
    """Return a subject followed by 'has' or 'have'."""
    return f"{subject} {'has' if subject.startswith(('every rank', 'rank ')) else 'have'}"
