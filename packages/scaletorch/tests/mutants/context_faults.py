"""Faults of context parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scaletorch.parallel.context_parallel import contiguous

from .mutant import Catalogue
from .patch import instead, patched

CONTEXT = Catalogue("parallel.context_parallel", "1x1x2x1")
fault = CONTEXT.fault
FORWARD, BACKWARD = "forward: *.self_attn", "backward: *.self_attn"


@fault("methods.ring:backward", born=BACKWARD)
def stale_keys_in_backward(backward: Any, *args: Any) -> Any:
    """The ring's backward goes on with the keys and values of its first step."""

    def stale(travelling: Any, k: Tensor, v: Tensor, ring: Any) -> Any:
        return ((step, k, v) for step, _, _ in travelling(k, v, ring))

    with patched("parallel.context_parallel.methods.ring:_rotate", instead(stale)):
        return backward(*args)


@fault("cp_comms:Ring.next_rank", "cp_comms:Ring.prev_rank", layout="1x1x3x1", born=FORWARD)
def ring_turns_the_other_way(neighbour: Any, self: Any) -> int:
    """Keys and values go to the previous rank, not to the next one."""
    step = self.ranks.index(neighbour(self)) - self.index
    rank: int = self.ranks[(self.index - step) % self.size]
    return rank


@fault("methods.call:_blocks", born=FORWARD)
def queries_see_later_shards(blocks: Any, mask: Any, rows: Any, keys: Any, *rest: Any) -> Any:
    """The causal mask holds within a shard and not across shards."""
    return blocks(mask if rows == keys else replace(mask, causal=False), rows, keys, *rest)


@fault("methods.call:Call.blocks", born=FORWARD)
def last_block_skipped(blocks: Any, self: Any, source: int, **options: Any) -> Any:
    """The last block that travels around the ring is left out."""
    last = (self.ring.index + 1) % self.ring.size
    return () if source == last else blocks(self, source, **options)


@fault("methods.call:backward", born=BACKWARD)
def grouped_gradients_averaged(backward: Any, operands: Any, *rest: Any) -> Any:
    """A key head's gradient is the mean over its query heads, not the sum."""
    dq, dk, dv = backward(operands, *rest)
    group = operands.q.shape[1] // operands.k.shape[1]
    return dq, dk / group, dv / group


@fault("methods.call:merge_into", born=FORWARD)
def merge_loses_weight(
    merge: Any, out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor
) -> None:
    """Merging two blocks keeps the larger log-sum-exp in place of their sum."""
    larger = torch.maximum(lse, block_lse)
    merge(out, lse, block_out, block_lse)
    lse.copy_(larger)


@fault("methods.ring:_add_received", born=BACKWARD)
def own_share_overwritten(arrived: Any, share: Any, arriving: Any, comm: Any) -> Any:
    """What arrives of dK and dV replaces this rank's own share."""
    total = arrived(share, arriving, comm)
    return total if arriving is None else total - share


@fault("methods.call:backward", born=BACKWARD)
def softmax_rows_forgotten(backward: Any, operands: Any, *rest: Any) -> Any:
    """Backward leaves out the row sums of the softmax's derivative."""
    return backward(operands._replace(out=torch.zeros_like(operands.out)), *rest)


@fault("methods.call:merge_into", dtype="float32", born=FORWARD)
def statistics_in_bfloat16(merge: Any, out: Tensor, lse: Tensor, *block: Tensor) -> None:
    """Sums over keys and ranks are kept in bfloat16 where float32 is promised."""
    merge(out, lse, *block)
    out.copy_(out.bfloat16())
    lse.copy_(lse.bfloat16())


@fault("sequences:shard_batch", born="data: position_ids")
def positions_of_first_shard(shard: Any, batch: Any, group: Any, **options: Any) -> Any:
    """Every context-parallel rank counts its positions from 0."""
    shards = shard(batch, group, **options)
    return {**shards, "position_ids": shards["position_ids"] - shards["position_ids"][:, :1]}


@fault("sequences:shard_batch", born="data: labels")
def labels_shifted_within_shards(shard: Any, batch: Any, group: Any, **options: Any) -> Any:
    """Labels are shifted within each shard, so that its last token has none."""
    shards = shard(batch, group, **options)
    shards["labels"][:, -1] = -100
    return shards


@fault("models.settings:Settings._shard_layout", born=FORWARD)
def attention_in_another_layout(shard_layout: Any, self: Any, documents: Any, length: Any) -> Any:
    """Attention takes shards to be contiguous that are zigzag."""
    return contiguous(length * self.ring.size, self.ring.size)


@fault("methods.ulysses:_Swap._heads_of", cp_method="ulysses", born=FORWARD)
def heads_of_another_rank(heads_of: Any, self: Any, x: Any, peer: Any) -> Any:
    """Ranks get each other's heads, and give them back as their own."""
    return heads_of(self, x, self.ranks.size - 1 - peer)
