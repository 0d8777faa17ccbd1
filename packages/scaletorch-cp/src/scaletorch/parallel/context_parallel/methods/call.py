"""One call of attention over a divided sequence: over which ranks, and how blocks are computed.

Shapes, with H query heads in groups over K key/value heads and L positions on each rank:

    q, out, grad_out, dq   [B, H, L, D]
    k, v, dk, dv           [B, K, L, D]
    lse                    [B, H, L]
    sinks                  [H]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from ..cp_comms import Parts, Ring, split
from ..kernels import (
    Operands,
    backward,
    forward,
    merge_into,
    statistics_dtype,
)
from ..kernels.block import without_unseeing_rows
from ..layouts.layout import Layout
from ..masks.blocks import Band
from ..masks.mask import Block, Mask, blocks

# q, k, v, and the output and lse over all keys, once or for each piece of the heads.
Saved = tuple[Tensor, ...]
Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k, v, in float32 at least
WithSinks = tuple[Tensor, Tensor, Tensor, Tensor | None]  # and of the sinks, if there are any
Arriving = Iterable[tuple[int, Tensor, Tensor]]  # whose keys and values are here, one by one


@dataclass(frozen=True, slots=True)
class Call:
    """What is computed, the same on every rank.

    Attributes:
        mask: Which positions see which.
        layout: Which positions each rank has.
        scale: Factor of the scores.
        kv_heads: Number of key/value heads.
        ring: The ranks.
        parts: The ranks that this one exchanges heads with, and the ring across such parts.
        softcap: Scores s are softcap · tanh(s / softcap); None leaves them.
        sinks: A score of each query head that takes no value, in float32 at least, or None.
    """

    mask: Mask
    layout: Layout
    scale: float
    kv_heads: int
    ring: Ring
    parts: Parts
    softcap: float | None = None
    sinks: Tensor | None = None

    def blocks(self, source: int) -> tuple[Block, ...]:
        """Return the blocks of this rank's queries with the keys of rank index `source`."""
        rows, keys = self.layout.ranks[self.ring.index], self.layout.ranks[source]
        return _blocks(self.mask, rows, keys, self.layout.length)

    def only_block(self, q: Tensor) -> Block | None:
        """Return the one block of all queries and keys, with which nothing is merged, if it is."""
        if self.ring.size > 1 or self.sinks is not None:
            return None
        found, whole = self.blocks(self.ring.index), slice(0, q.shape[2])
        return found[0] if [each[:2] for each in found] == [(whole, whole)] else None

    def attend(
        self, source: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        """Merge attention over the keys of rank index `source` into `out` and `lse`, in place."""
        # On other devices the quickest kernels know half precision alone.
        if self._weighs_the_same and q.device.type == "cpu":
            q, k, v = (x.to(out.dtype) for x in (q, k, v))
        for block in self.blocks(source):
            rows, keys = block.rows, block.keys
            seen = q[:, :, rows], k[:, :, keys], v[:, :, keys]
            part = forward(*seen, self.scale, block.band, self.softcap)
            merge_into(out[:, :, rows], lse[:, :, rows], *part)

    def attend_backward(
        self, source: int, grad_out: Tensor, saved: Saved, totals: Gradients
    ) -> None:
        """Add the gradients of attention over the keys of rank index `source`, in place."""
        operands = Operands(grad_out, *saved)
        for block in self.blocks(source):
            rows, keys = block.rows, block.keys
            grads = backward(operands.part(rows, keys), self.scale, block.band, self.softcap)
            for total, grad, place in zip(totals, grads, (rows, keys, keys), strict=True):
                total[:, :, place].add_(grad)

    @property
    def _weighs_the_same(self) -> bool:
        """Whether the blocks of most rows weigh the same in their output.

        Were each rounded to half precision before they are merged, it would lose up to 1.4 times
        as much as in one process; if one outweighs the others, 1.2 times.
        """
        strided = self.layout.ranks[0][0].step > 1
        return self.ring.size > 1 and (strided or not self.mask.causal)


@lru_cache(maxsize=128)  # stripes and many documents make many blocks
def _blocks(
    mask: Mask, rows: tuple[range, ...], keys: tuple[range, ...], length: int
) -> tuple[Block, ...]:
    return tuple(blocks(mask, rows, keys, length))


def nothing_seen(q: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `out` and `lse` of queries that have seen no key yet, in float32 at least.

    A sink is one more score without a value: it is what every row begins with.
    """
    dtype = statistics_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
    return out, lse if sinks is None else lse.copy_(sinks.unsqueeze(-1))


def of_sinks(grad_out: Tensor, saved: Saved, call: Call) -> Tensor | None:
    """Return this rank's part of the gradient of its sinks, [H] in float32 at least.

    A sink of weight p in a row takes p · 0 of the output, so its gradient is −p · Σ grad · out.
    """
    if call.sinks is None:
        return None
    *_, out, lse = saved
    weights = torch.exp(call.sinks.unsqueeze(-1) - without_unseeing_rows(lse))
    return (weights * (grad_out.to(lse.dtype) * out).sum(-1)).sum((0, 2)).neg_()


def no_gradient(x: Tensor, *leading: int) -> Tensor:
    """Return zeros of `x`'s shape behind `leading`, in float32 at least."""
    return torch.zeros((*leading, *x.shape), dtype=statistics_dtype(x.dtype), device=x.device)


def attend_all(
    arriving: Arriving, q: Tensor, k: Tensor, v: Tensor, call: Call
) -> tuple[Tensor, Saved]:
    """Attend to the keys and values of all ranks as they arrive.

    Returns:
        This rank's output [B, H, L, D] in q's dtype, and what backward needs.
    """
    out, lse = nothing_seen(q, call.sinks)
    for source, keys, values in arriving:
        call.attend(source, q, keys, values, out, lse)
    out = out.to(q.dtype)
    return out, (q, k, v, out, lse)


def attend_once(q: Tensor, k: Tensor, v: Tensor, band: Band, call: Call) -> tuple[Tensor, Saved]:
    """Attend to the only block there is; as `attend_all`."""
    out, lse = forward(q, k, v, call.scale, band, call.softcap)
    out = out.to(q.dtype)
    return out, (q, k, v, out, lse)


def attend_once_backward(grad_out: Tensor, saved: Saved, band: Band, call: Call) -> WithSinks:
    """Return the gradients of q, k and v of the only block there is."""
    return *backward(Operands(grad_out, *saved), call.scale, band, call.softcap), None


def part_size(kv_heads: int, size: int) -> int:
    """Return over how many of `size` ranks "hybrid" divides heads, without replicating any."""
    return gcd(kv_heads, size)


def parts_for(method: str, q: Tensor, k: Tensor, ring: Ring) -> Parts:
    """Return how a method divides the ranks: into those that exchange heads, and rings across.

    Heads that do not divide over all ranks are divided as "hybrid" does.
    """
    heads, kv_heads, size = q.shape[1], k.shape[1], 1
    if method in ("ulysses", "hybrid"):
        size = part_size(kv_heads, ring.size)
    if method == "ulysses" and heads % ring.size == 0 == ring.size % kv_heads:
        size = ring.size  # fewer key/value heads than ranks go to several each
    return split(ring, size)
