"""One call of attention over a sharded sequence: its options, its ranks and its blocks.

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

from ..cp_comms import Ring
from ..kernels import backward, forward
from ..kernels.block import Gradients, Operands, merge_into, statistics_dtype, without_empty_rows
from ..layouts import Layout
from ..masks import Block, Mask, blocks

# q, k, v, and the output and lse over all keys, for the heads that this rank computes.
Saved = tuple[Tensor, ...]
WithSinks = tuple[Tensor, Tensor, Tensor, Tensor | None]  # dq, dk, dv, and dsinks with sinks
KeysAndValues = Iterable[tuple[int, Tensor, Tensor]]  # of one rank after another, with its index
# Neighbours that exchange heads, and the ring of this rank's counterparts in all such subgroups.
Subgroups = tuple[Ring, Ring]


@dataclass(frozen=True, slots=True)
class Call:
    """The options of a call, the same on every rank."""

    mask: Mask
    layout: Layout
    scale: float  # factor of the scores
    kv_heads: int
    ring: Ring
    subgroups: Subgroups
    softcap: float | None = None  # scores s are softcap · tanh(s / softcap)
    sinks: Tensor | None = None  # a score of each query head without a value, in float32 at least

    def blocks(self, source: int) -> tuple[Block, ...]:
        """Return the blocks of this rank's queries with the keys of rank index `source`."""
        rows, keys = self.layout.ranks[self.ring.index], self.layout.ranks[source]
        return _blocks(self.mask, rows, keys, self.layout.length)

    def single_block(self, q: Tensor) -> Block | None:
        """Return the block of all queries and keys if it is the only one: nothing is merged."""
        if self.ring.size > 1 or self.sinks is not None:
            return None
        found, whole = self.blocks(self.ring.index), slice(0, q.shape[2])
        return found[0] if [each[:2] for each in found] == [(whole, whole)] else None

    def single_backward(self, grad_out: Tensor, saved: Saved) -> WithSinks | None:
        """Return the gradients of q, k and v for the only block, or None if there are several."""
        single = self.single_block(saved[0])
        if single is None:
            return None
        grads = backward(Operands(grad_out, *saved), self.scale, single.band, self.softcap)
        return *grads, None

    def attend(
        self, source: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        """Merge attention over the keys of rank index `source` into `out` and `lse`, in place."""
        # Rounding blocks of similar weights would lose up to 1.4 times as much. The fastest kernels
        # of other devices take half precision only.
        strided = self.layout.ranks[0][0].step > 1
        similar = self.ring.size > 1 and (strided or not self.mask.causal)
        if similar and q.device.type == "cpu":
            q, k, v = (x.to(out.dtype) for x in (q, k, v))
        for block in self.blocks(source):
            rows, keys = block.rows, block.keys
            operands = q[:, :, rows], k[:, :, keys], v[:, :, keys]
            result = forward(*operands, self.scale, block.band, self.softcap)
            merge_into(out[:, :, rows], lse[:, :, rows], *result)

    def attend_backward(
        self, source: int, grad_out: Tensor, saved: Saved, totals: Gradients
    ) -> None:
        """Add the gradients of attention over the keys of rank index `source`, in place."""
        operands = Operands(grad_out, *saved)
        for block in self.blocks(source):
            rows, keys = block.rows, block.keys
            grads = backward(operands.select(rows, keys), self.scale, block.band, self.softcap)
            for total, grad, place in zip(totals, grads, (rows, keys, keys), strict=True):
                total[:, :, place].add_(grad)


@lru_cache(maxsize=128)  # stripes and many documents make many blocks
def _blocks(
    mask: Mask, rows: tuple[range, ...], keys: tuple[range, ...], length: int
) -> tuple[Block, ...]:
    return tuple(blocks(mask, rows, keys, length))


def sink_gradient(grad_out: Tensor, saved: Saved, call: Call) -> Tensor | None:
    """Return this rank's partial sum of the gradient of its sinks, [H] in float32 at least.

    A sink of weight p in a row adds p · 0 to the output, so its gradient is −p · Σ grad · out.
    """
    if call.sinks is None:
        return None
    *_, out, lse = saved
    weights = torch.exp(call.sinks.unsqueeze(-1) - without_empty_rows(lse))
    return (weights * (grad_out.to(lse.dtype) * out).sum(-1)).sum((0, 2)).neg_()


def zero_totals(x: Tensor, *leading: int) -> Tensor:
    """Return zeros of shape `(*leading, *x.shape)`, in float32 at least."""
    return torch.zeros((*leading, *x.shape), dtype=statistics_dtype(x.dtype), device=x.device)


def attend_all(
    arriving: KeysAndValues, q: Tensor, k: Tensor, v: Tensor, call: Call
) -> tuple[Tensor, Saved]:
    """Attend to the keys and values of all ranks as they arrive; results as of `forward`."""
    single = call.single_block(q)
    if single is not None:
        out, lse = forward(q, k, v, call.scale, single.band, call.softcap)
        out = out.to(q.dtype)
        return out, (q, k, v, out, lse)
    out = zero_totals(q)
    lse = out.new_full(q.shape[:-1], -torch.inf)
    if call.sinks is not None:  # every row begins with its sink, a score without a value
        lse.copy_(call.sinks.unsqueeze(-1))
    for source, keys, values in arriving:
        call.attend(source, q, keys, values, out, lse)
    out = out.to(q.dtype)
    return out, (q, k, v, out, lse)


def subgroups_for(method: str, q: Tensor, k: Tensor, ring: Ring) -> Subgroups:
    """Divide the ranks into subgroups that exchange heads, and rings across the subgroups.

    Heads that do not divide over all ranks are divided as in "hybrid".
    """
    heads, kv_heads, size = q.shape[1], k.shape[1], 1
    if method in ("ulysses", "hybrid"):
        size = gcd(kv_heads, ring.size)
    if method == "ulysses" and heads % ring.size == 0 == ring.size % kv_heads:
        size = ring.size  # fewer key/value heads than ranks: each goes to several ranks
    subgroup, place = divmod(ring.index, size)
    neighbours = ring.ranks[subgroup * size : (subgroup + 1) * size]
    return Ring(ring.group, neighbours, place), Ring(ring.group, ring.ranks[place::size], subgroup)
