"""Ulysses: ranks exchange positions for heads, so that each has all positions of some heads.

A rank of a part of U neighbours gets all the part's positions of H / U query heads and of the
key/value heads that these use, and gives the output back the same way. If the part is all
ranks, that is whole attention, and any kernel will do; otherwise ("hybrid") a ring of the N / U
parts goes on with the positions that each part has, and heads need not be as many as ranks. If
there are fewer key/value heads than ranks in a part each goes to several, whose gradients are
summed.

Sent per rank and call, with Q and O bytes of queries and output and M of K and V on a rank:
(Q + O + M) · (U − 1) / U forward and again backward; M counts as often as a key/value head is
replicated, and dQ, dK and dV travel in float32 at least. A ring across N / U parts sends M as
often as it has hops, N / U − 1, as `ring` says. See https://arxiv.org/abs/2309.14509 and, for
the two together, https://arxiv.org/abs/2405.07719.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....dist import exchange
from ..cp_comms import Ring
from ..layouts.layout import joined
from . import ring
from .call import Call, Saved, WithSinks

Shard = tuple[range, ...]  # runs of positions in local order


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved]:
    """Return this rank's output [B, H, L, D] in q's dtype, and what backward needs."""
    if call.parts[0].size == 1:
        return ring.forward(q, k, v, call)
    swap, inner = _of_parts(call)
    queries, keys, values = swap.to_heads((q, k, v))
    out, saved = ring.forward(queries, keys, values, inner)
    return swap.to_positions((out,))[0], saved


def backward(grad_out: Tensor, saved: Saved, call: Call) -> WithSinks:
    """Return dq, dk, dv of this rank's positions and its part of sinks', in float32 at least."""
    if call.parts[0].size == 1:
        return ring.backward(grad_out, saved, call)
    swap, inner = _of_parts(call)
    (grad,) = swap.to_heads((grad_out,))
    *grads, of_sinks = ring.backward(grad, saved, inner)
    dq, dk, dv = swap.to_positions(grads)
    sinks = None if call.sinks is None else torch.zeros_like(call.sinks)
    if sinks is not None and of_sinks is not None:
        swap.own_heads(sinks).copy_(of_sinks)
    return dq, _summed(dk, call.kv_heads), _summed(dv, call.kv_heads), sinks


@dataclass(frozen=True, slots=True)
class _Swap:
    """Positions for heads, and back: the exchange within a part of the ranks.

    Attributes:
        part: The ranks, U of them.
        shards: The positions of each.
        whole: The positions of all, in the order in which the part has them together.
    """

    part: Ring
    shards: tuple[Shard, ...]
    whole: Shard

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Give heads of this rank's positions for positions of this rank's heads.

        Args:
            tensors: Each [B, H, L, D]. If there are fewer heads than ranks each goes to several.

        Returns:
            Each [B, max(1, H / U), U · L, D].
        """
        sends, recvs, results = [], [], []
        for x in tensors:
            batch, heads, length, dim = x.shape
            heads = max(1, heads // self.part.size)
            out = x.new_empty(batch, heads, self.part.size * length, dim)
            results.append(out)
            for peer, (rank, shard) in enumerate(self._peers()):
                heads_of_peer = self._heads_of(x, peer)
                sends += [(heads_of_peer[:, :, here], rank) for here, _ in self._own()]
                recvs += [(out[:, :, there], rank) for _, there in _slots(shard, self.whole)]
        exchange(sends, recvs, self.part.group)
        return results

    def to_positions(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Give positions of this rank's heads for heads of its positions: the way back.

        Args:
            tensors: Each [B, h, U · L, D].

        Returns:
            Each [B, U · h, L, D].
        """
        sends, recvs, results = [], [], []
        for x in tensors:
            batch, heads, length, dim = x.shape
            size = self.part.size
            out = x.new_empty(batch, size, heads, length // size, dim)
            results.append(out.flatten(1, 2))
            for peer, (rank, shard) in enumerate(self._peers()):
                sends += [(x[:, :, there], rank) for _, there in _slots(shard, self.whole)]
                recvs += [(out[:, peer, :, here], rank) for here, _ in self._own()]
        exchange(sends, recvs, self.part.group)
        return results

    def own_heads(self, x: Tensor) -> Tensor:
        """Return this rank's heads of x [H], as a view."""
        return self._heads_of(x.unsqueeze(0), self.part.index).squeeze(0)

    def _heads_of(self, x: Tensor, peer: int) -> Tensor:
        """Return the heads that go to a rank of the part, as a view."""
        heads = x.shape[1]
        return x.narrow(1, peer * heads // self.part.size, max(1, heads // self.part.size))

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


def _of_parts(call: Call) -> tuple[_Swap, Call]:
    """Return the exchange of a part, and the call of the ring across parts."""
    part, across = call.parts
    layout = joined(call.layout, part.size)
    first = across.index * part.size
    shards = call.layout.ranks[first : first + part.size]
    swap = _Swap(part, shards, layout.ranks[across.index])
    sinks = None if call.sinks is None else swap.own_heads(call.sinks)
    return swap, replace(call, layout=layout, ring=across, sinks=sinks)


def _summed(grad: Tensor, kv_heads: int) -> Tensor:
    """Return the gradients of replicated heads [B, K · copies, L, D] summed, [B, K, L, D]."""
    return grad if grad.shape[1] == kv_heads else grad.unflatten(1, (kv_heads, -1)).sum(2)
