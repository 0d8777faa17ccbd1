"""Ulysses attention: ranks exchange positions for heads; each then has all positions of some heads.

A rank of a subgroup of U neighbours gets all the subgroup's positions of H / U query heads and of
the key/value heads that they use, and sends the output back the same way. If the subgroup is all
ranks, each attends to whole sequences, with any kernel. Otherwise ("hybrid") a ring
across the N / U subgroups continues with the positions of each, and fewer heads than ranks suffice.
If there are fewer key/value heads than ranks in a subgroup, each goes to several ranks, whose
gradients are summed. Gradients travel in float32 at least.
See https://arxiv.org/abs/2309.14509 and, for the two together, https://arxiv.org/abs/2405.07719.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....dist import exchange
from ..cp_comms import Ring
from ..layouts import merge_ranks
from . import ring
from .call import Call, Saved, WithSinks

Shard = tuple[range, ...]  # runs of positions in local order
Messages = list[tuple[Tensor, int]]  # views, each with the global rank of the other side


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved]:
    """Return this rank's output [B, H, L, D] in q's dtype, and the tensors for backward."""
    if call.subgroups[0].size == 1:
        return ring.forward(q, k, v, call)
    swap, inner = _swap_and_ring(call)
    queries, keys, values = swap.to_heads((q, k, v))
    out, saved = ring.forward(queries, keys, values, inner)
    return swap.to_positions((out,))[0], saved


def backward(grad_out: Tensor, saved: Saved, call: Call) -> WithSinks:
    """Return dq, dk, dv of this rank's positions and its partial dsinks, in float32 at least."""
    if call.subgroups[0].size == 1:
        return ring.backward(grad_out, saved, call)
    swap, inner = _swap_and_ring(call)
    (grad,) = swap.to_heads((grad_out,))
    *grads, own_sinks = ring.backward(grad, saved, inner)
    dq, dk, dv = swap.to_positions(grads)
    sinks = None if call.sinks is None else torch.zeros_like(call.sinks)
    if sinks is not None and own_sinks is not None:
        swap.own_heads(sinks).copy_(own_sinks)
    return dq, _sum_copies(dk, call.kv_heads), _sum_copies(dv, call.kv_heads), sinks


@dataclass(frozen=True, slots=True)
class _Swap:
    """The exchange of positions for heads, and back, within a subgroup of the ranks."""

    ranks: Ring  # the subgroup, U ranks
    shards: tuple[Shard, ...]  # the positions of each rank
    whole: Shard  # the positions of the subgroup, in its common order

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Exchange all heads of this rank's positions for all positions of this rank's heads.

        Each [B, H, L, D] becomes [B, max(1, H / U), U · L, D]. If there are fewer heads than ranks,
        each head goes to several ranks.
        """
        sends, recvs, results = [], [], []
        for x in tensors:
            heads = [self._heads_of(x, peer) for peer in range(self.ranks.size)]
            batch, count, length, dim = heads[0].shape
            results.append(x.new_empty(batch, count, self.ranks.size * length, dim))
            messages = self._messages(heads, results[-1])
            sends += messages[0]
            recvs += messages[1]
        exchange(sends, recvs, self.ranks.group)
        return results

    def to_positions(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Exchange all positions of this rank's heads for all heads of this rank's positions.

        Each [B, h, U · L, D] becomes [B, U · h, L, D].
        """
        sends, recvs, results = [], [], []
        for x in tensors:
            batch, heads, length, dim = x.shape
            size = self.ranks.size
            out = x.new_empty(batch, size, heads, length // size, dim)
            results.append(out.flatten(1, 2))
            messages = self._messages(out.unbind(1), x)
            recvs += messages[0]
            sends += messages[1]
        exchange(sends, recvs, self.ranks.group)
        return results

    def _messages(self, heads: Sequence[Tensor], positions: Tensor) -> tuple[Messages, Messages]:
        """Return views of each rank's `heads` here, and of all `positions` of this rank's heads."""
        own = _places(self.shards[self.ranks.index], self.whole)
        by_heads: Messages = []
        by_positions: Messages = []
        for rank, shard, x in zip(self.ranks.ranks, self.shards, heads, strict=True):
            by_heads += [(x[:, :, local], rank) for local, _ in own]
            by_positions += [(positions[:, :, at], rank) for _, at in _places(shard, self.whole)]
        return by_heads, by_positions

    def own_heads(self, x: Tensor) -> Tensor:
        """Return this rank's heads of x [H], as a view."""
        return self._heads_of(x.unsqueeze(0), self.ranks.index).squeeze(0)

    def _heads_of(self, x: Tensor, peer: int) -> Tensor:
        """Return the heads of one rank of the subgroup, as a view."""
        heads = x.shape[1]
        return x.narrow(1, peer * heads // self.ranks.size, max(1, heads // self.ranks.size))


def _places(shard: Shard, whole: Shard) -> list[tuple[slice, slice]]:
    """Return the slices of each run of a shard in the shard and in the whole."""
    places, local = [], 0
    for run in shard:
        top = 0
        for target in whole:
            if run.start in target:
                first, step = top + target.index(run.start), run.step // target.step
                end = first + (len(run) - 1) * step + 1
                places.append((slice(local, local + len(run)), slice(first, end, step)))
            top += len(target)
        local += len(run)
    return places


def _swap_and_ring(call: Call) -> tuple[_Swap, Call]:
    """Return the exchange within the subgroup, and the call of the ring across subgroups."""
    subgroup, across = call.subgroups
    layout = merge_ranks(call.layout, subgroup.size)
    first = across.index * subgroup.size
    shards = call.layout.ranks[first : first + subgroup.size]
    swap = _Swap(subgroup, shards, layout.ranks[across.index])
    sinks = None if call.sinks is None else swap.own_heads(call.sinks)
    return swap, replace(call, layout=layout, ring=across, sinks=sinks)


def _sum_copies(grad: Tensor, kv_heads: int) -> Tensor:
    """Return the gradients of replicated heads [B, K · copies, L, D] summed, [B, K, L, D]."""
    return grad if grad.shape[1] == kv_heads else grad.unflatten(1, (kv_heads, -1)).sum(2)
