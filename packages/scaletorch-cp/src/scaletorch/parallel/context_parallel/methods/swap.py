"""Positions for heads, and back: what the ranks of a part exchange."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ....dist.collectives.p2p import exchange
from ..cp_comms import Ring

Share = tuple[range, ...]  # runs of positions in local order


@dataclass(frozen=True, slots=True)
class Swap:
    """Who of a part has which positions, and the order in which the part has them together.

    Attributes:
        part: The ranks, U of them.
        shares: The positions of each.
        whole: The positions of all.
    """

    part: Ring
    shares: tuple[Share, ...]
    whole: Share

    def to_heads(self, x: Tensor) -> Tensor:
        """Give heads of this rank's positions for positions of this rank's heads.

        Args:
            x: [B, H, L, D]. Where there are fewer heads than ranks each goes to several.

        Returns:
            [B, max(1, H / U), U · L, D].
        """
        if self.part.size == 1:
            return x
        ranks, size = self.part.ranks, self.part.size
        pieces = [_heads_of(x, peer, size) for peer in range(size)]
        batch, heads, length, dim = pieces[0].shape
        out = x.new_empty(batch, heads, size * length, dim)
        own = _slots(self.shares[self.part.index], self.whole)
        sends = [
            (piece[:, :, here], rank)
            for piece, rank in zip(pieces, ranks, strict=True)
            for here, _ in own
        ]
        recvs = [
            (out[:, :, there], rank)
            for share, rank in zip(self.shares, ranks, strict=True)
            for _, there in _slots(share, self.whole)
        ]
        exchange(sends, recvs, self.part.group)
        return out

    def to_positions(self, x: Tensor) -> Tensor:
        """Give positions of this rank's heads for heads of this rank's positions: the way back.

        Args:
            x: [B, h, U · L, D].

        Returns:
            [B, U · h, L, D].
        """
        if self.part.size == 1:
            return x
        ranks, size = self.part.ranks, self.part.size
        batch, heads, length, dim = x.shape
        out = x.new_empty(batch, size, heads, length // size, dim)
        own = _slots(self.shares[self.part.index], self.whole)
        sends = [
            (x[:, :, there], rank)
            for share, rank in zip(self.shares, ranks, strict=True)
            for _, there in _slots(share, self.whole)
        ]
        recvs = [
            (out[:, peer, :, here], rank) for peer, rank in enumerate(ranks) for here, _ in own
        ]
        exchange(sends, recvs, self.part.group)
        return out.flatten(1, 2)


def _heads_of(x: Tensor, peer: int, size: int) -> Tensor:
    """Return the heads that go to a rank of a part, as a view."""
    heads = x.shape[1]
    return x.narrow(1, peer * heads // size, max(1, heads // size))


def _slots(share: Share, whole: Share) -> list[tuple[slice, slice]]:
    """Return of each run of a share where it lies in the share and where in the whole."""
    slots, local = [], 0
    for run in share:
        top = 0
        for target in whole:
            if run.start in target:
                first, step = top + target.index(run.start), run.step // target.step
                end = first + (len(run) - 1) * step + 1
                slots.append((slice(local, local + len(run)), slice(first, end, step)))
            top += len(target)
        local += len(run)
    return slots
