"""One call of attention over a divided sequence, and what every method does with its blocks.

Shapes, with H query heads in groups over K key/value heads and L positions on each rank:

    q, out, grad_out, dq   [B, H, L, D]
    k, v, dk, dv           [B, K, L, D]
    lse                    [B, H, L]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..cp_comms import Ring
from ..kernels import Operands, backward, forward, merge_into, statistics_dtype
from ..layouts.layout import Layout
from ..masks.mask import Block, Mask, blocks
from .parts import Parts

# q, k, v, and the output and lse over all keys, once or for each piece of the heads.
Saved = tuple[Tensor, ...]
Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k, v, in float32 at least


@dataclass(frozen=True, slots=True)
class Call:
    """What is computed, alike on every rank.

    Attributes:
        mask: Which positions see which.
        layout: Which positions each rank has.
        scale: Factor of the scores.
        kv_heads: Number of key/value heads.
        ring: The ranks.
        parts: The ranks that this one exchanges heads with, and the ring across such parts.
    """

    mask: Mask
    layout: Layout
    scale: float
    kv_heads: int
    ring: Ring
    parts: Parts

    def blocks(self, source: int) -> tuple[Block, ...]:
        """Return the blocks of this rank's queries with the keys of rank index `source`."""
        rows, keys = self.layout.ranks[self.ring.index], self.layout.ranks[source]
        return _blocks(self.mask, rows, keys, self.layout.length)

    def attend(
        self, source: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        """Merge attention over the keys of rank index `source` into `out` and `lse`, in place."""
        # On other devices the quickest kernels know half precision alone.
        if self._weighs_alike and q.device.type == "cpu":
            q, k, v = (x.to(out.dtype) for x in (q, k, v))
        for block in self.blocks(source):
            rows, keys = block.rows, block.keys
            part = forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], self.scale, block.band)
            merge_into(out[:, :, rows], lse[:, :, rows], *part)

    def attend_backward(
        self, source: int, grad_out: Tensor, saved: Saved, totals: Gradients
    ) -> None:
        """Add the gradients of attention over the keys of rank index `source`, in place."""
        operands = Operands(grad_out, *saved)
        for block in self.blocks(source):
            rows, keys = block.rows, block.keys
            grads = backward(operands.part(rows, keys), self.scale, block.band)
            for total, grad, place in zip(totals, grads, (rows, keys, keys), strict=True):
                total[:, :, place].add_(grad)

    @property
    def _weighs_alike(self) -> bool:
        """Whether the blocks of most rows weigh alike in their output.

        Were each rounded to half precision before they are merged, it would lose up to 1.4 times
        as much as in one process; where one outweighs the others, 1.2 times.
        """
        in_several = self.ring.size > 1 or self.mask.window is not None
        strided = self.layout.ranks[0][0].step > 1
        return in_several and (strided or not self.mask.causal)


@lru_cache(maxsize=128)  # stripes and many documents make many blocks
def _blocks(
    mask: Mask, rows: tuple[range, ...], keys: tuple[range, ...], length: int
) -> tuple[Block, ...]:
    return tuple(blocks(mask, rows, keys, length))


def nothing_seen(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return `out` and `lse` of queries that have seen no key yet, in float32 at least."""
    dtype = statistics_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    return out, torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)


def no_gradient(x: Tensor, *leading: int) -> Tensor:
    """Return zeros of `x`'s shape behind `leading`, in float32 at least."""
    return torch.zeros((*leading, *x.shape), dtype=statistics_dtype(x.dtype), device=x.device)
