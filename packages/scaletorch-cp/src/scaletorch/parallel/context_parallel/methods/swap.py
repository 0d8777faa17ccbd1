"""Positions for heads, and back: the exchange within a part of the ranks, some heads at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ....dist import exchange
from ..cp_comms import Ring

if TYPE_CHECKING:
    from ....dist import Work

Shard = tuple[range, ...]  # runs of positions in local order


@dataclass(frozen=True, slots=True)
class Swap:
    """Who of a part has which positions, and the order in which the part has them together.

    Attributes:
        part: The ranks, U of them.
        shards: The positions of each.
        whole: The positions of all.
        pieces: In how many pieces a rank's heads travel.
    """

    part: Ring
    shards: tuple[Shard, ...]
    whole: Shard
    pieces: int

    def to_heads(self, tensors: tuple[Tensor, ...], piece: int) -> tuple[list[Tensor], Work[None]]:
        """Start to give heads of this rank's positions for positions of this rank's heads.

        Args:
            tensors: Each [B, H, L, D]. If there are fewer heads than ranks each goes to several.
            piece: Which of each rank's heads.

        Returns:
            Where they arrive, each [B, max(1, H / U) / pieces, U · L, D], and what to wait for.
        """
        sends, recvs, results = [], [], []
        for x in tensors:
            each = [self._heads_of(x, peer, piece) for peer in range(self.part.size)]
            batch, heads, length, dim = each[0].shape
            out = x.new_empty(batch, heads, self.part.size * length, dim)
            results.append(out)
            for heads_of_peer, (rank, shard) in zip(each, self._peers(), strict=True):
                sends += [(heads_of_peer[:, :, here], rank) for here, _ in self._own()]
                recvs += [(out[:, :, there], rank) for _, there in _slots(shard, self.whole)]
        return results, exchange(sends, recvs, self.part.group, async_op=True)

    def to_positions(
        self, tensors: tuple[Tensor, ...], into: tuple[Tensor, ...], piece: int
    ) -> Work[None]:
        """Start to give positions of this rank's heads for heads of its positions: the way back.

        Args:
            tensors: Each [B, h, U · L, D].
            into: Where they arrive: each [B, U, h · pieces, L, D].
            piece: Which of each rank's heads.
        """
        sends, recvs = [], []
        for x, out in zip(tensors, into, strict=True):
            heads = x.shape[1]
            arriving = out.narrow(2, piece * heads, heads)
            for peer, (rank, shard) in enumerate(self._peers()):
                sends += [(x[:, :, there], rank) for _, there in _slots(shard, self.whole)]
                recvs += [(arriving[:, peer, :, here], rank) for here, _ in self._own()]
        return exchange(sends, recvs, self.part.group, async_op=True)

    def own_heads(self, x: Tensor, piece: int) -> Tensor:
        """Return a piece of this rank's heads of x [H], as a view."""
        return self._heads_of(x.unsqueeze(0), self.part.index, piece).squeeze(0)

    def _heads_of(self, x: Tensor, peer: int, piece: int) -> Tensor:
        """Return a piece of the heads that go to a rank of the part, as a view."""
        first, heads = peer * x.shape[1] // self.part.size, max(1, x.shape[1] // self.part.size)
        return x.narrow(1, first + piece * heads // self.pieces, heads // self.pieces)

    def _peers(self) -> Iterator[tuple[int, Shard]]:
        return zip(self.part.ranks, self.shards, strict=True)

    def _own(self) -> list[tuple[slice, slice]]:
        return _slots(self.shards[self.part.index], self.whole)


def _slots(shard: Shard, whole: Shard) -> list[tuple[slice, slice]]:
    """Return for each run of a shard its place in the shard and its place in the whole."""
    slots, local = [], 0
    for run in shard:
        top = 0
        for target in whole:
            if run.start in target:
                first, step = top + target.index(run.start), run.step // target.step
                end = first + (len(run) - 1) * step + 1
                slots.append((slice(local, local + len(run)), slice(first, end, step)))
            top += len(target)
        local += len(run)
    return slots
