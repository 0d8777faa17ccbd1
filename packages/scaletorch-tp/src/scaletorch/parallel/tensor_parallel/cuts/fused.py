"""One weight of several packed parts, such as [query | key | value]: each part is cut by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ....dist.errors import InvalidArgumentError
from .cut import Cut

FUSABLE = ("column", "column_gather", "row")


@dataclass(frozen=True, slots=True)
class Fused:
    """A style for a linear layer whose divided features are several parts in one weight.

    Each part is cut over the ranks, and a rank's weight holds its share of every part in their
    order; so the model's own `split` or `chunk` of the output still finds them. Parts that are
    interleaved head by head (GPT-NeoX) are cut at head borders by plain "column".

    Args:
        style: "column", "column_gather" or "row".
        parts: Length of each part in the whole, or a number of equal parts.

    Raises:
        InvalidArgumentError: The style has no parts, or a length is not positive.

    Example:
        >>> plan = {"**.qkv": Fused("column", (512, 128, 128)), "**.gate_up": Fused("column", 2)}
    """

    style: str
    parts: int | tuple[int, ...]

    def __post_init__(self) -> None:
        if self.style not in FUSABLE:
            styles = ", ".join(map(repr, FUSABLE))
            raise InvalidArgumentError(f"Fused takes one of {styles}, got {self.style!r}")
        lengths = (self.parts,) if isinstance(self.parts, int) else tuple(self.parts)
        if not lengths or not all(type(n) is int and n > 0 for n in lengths):
            raise InvalidArgumentError(
                f"Fused takes a number of equal parts or the length of each, got {self.parts!r}"
            )
        if not isinstance(self.parts, int):
            object.__setattr__(self, "parts", lengths)

    def misfit(self, length: int) -> str | None:
        """Return why a length does not consist of these parts, or None if it does."""
        if isinstance(self.parts, int):
            uneven = length % self.parts
            return f"its {length} features are not {self.parts} equal parts" if uneven else None
        total = sum(self.parts)
        if total == length:
            return None
        return f"its parts add up to {total} features, but it has {length}"

    def lengths(self, length: int) -> tuple[int, ...]:
        """Return the length of each part of `length`, which consists of them."""
        if isinstance(self.parts, int):
            return (length // self.parts,) * self.parts
        return self.parts


@dataclass(frozen=True, slots=True)
class FusedCut(Cut):
    """A length of several parts, of each of which every rank has a share, its own or a replica.

    Args:
        parts: Length of all that each rank has.
        ranks: Each rank's own place.
        cuts: How each part is cut, in their order.
    """

    cuts: tuple[Cut, ...]

    @property
    def whole(self) -> int:
        """The length that was cut."""
        return sum(cut.whole for cut in self.cuts)

    @property
    def replicated(self) -> bool:
        """Whether several ranks have one share of a part."""
        return any(cut.replicated for cut in self.cuts)

    @property
    def in_order(self) -> bool:
        """Whether the ranks' parts are the whole as it is: never, as each has some of all."""
        return False

    @property
    def packed(self) -> tuple[Cut, ...]:
        """How each part is cut."""
        return self.cuts

    def take(self, full: Tensor, dim: int, rank: int) -> Tensor:
        """Return a copy of what `rank` has along `dim`: its share of each part, joined."""
        wholes = full.split([cut.whole for cut in self.cuts], dim)
        shares = [cut.take(w, dim, rank) for cut, w in zip(self.cuts, wholes, strict=True)]
        return torch.cat(shares, dim)

    def ranges(self, rank: int) -> tuple[range, ...]:
        """Return which indices of the whole `rank` has: those of its share of each part."""
        starts = accumulate((cut.whole for cut in self.cuts[:-1]), initial=0)
        return tuple(
            range(start + share.start, start + share.stop)
            for start, cut in zip(starts, self.cuts, strict=True)
            for share in cut.ranges(rank)
        )

    def arrange(self, joined: Tensor, dim: int) -> Tensor:
        """Return the whole, given all ranks' parts in their order."""
        ranks = joined.split(self.sizes, dim)
        shares = [
            part.split([cut.sizes[rank] for cut in self.cuts], dim)
            for rank, part in enumerate(ranks)
        ]
        parts = zip(self.cuts, zip(*shares, strict=True), strict=True)
        return torch.cat([part[rank] for cut, part in parts for rank in cut.owners], dim)


def fuse(cuts: Sequence[Cut]) -> Cut:
    """Return the cut of several parts in one length, each cut so; one part is its own."""
    if len(cuts) == 1:
        return cuts[0]
    sizes = tuple(map(sum, zip(*(cut.sizes for cut in cuts), strict=True)))
    return FusedCut(sizes, tuple(range(len(sizes))), tuple(cuts))
