"""Faults of context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scaletorch.parallel.context_parallel import contiguous

from .mutant import Catalogue
from .patch import patched

CONTEXT = Catalogue("parallel.context_parallel", "1x1x2x1")
fault = CONTEXT.fault
FORWARD, BACKWARD = "forward: *.self_attn", "backward: *.self_attn"


@fault("methods.ring:backward", born=BACKWARD)
def stale_keys_in_backward(backward: Any) -> Any:
    """The ring's backward goes on with the keys and values of its first step."""

    def stale(travelling: Any) -> Any:
        def first_again(k: Tensor, v: Tensor, ring: Any) -> Iterator[tuple[int, Tensor, Tensor]]:
            return ((step, k, v) for step, _, _ in travelling(k, v, ring))

        return first_again

    def faulty(*args: Any) -> Any:
        with patched("parallel.context_parallel.methods.ring:_rotate", stale):
            return backward(*args)

    return faulty


@fault("cp_comms:Ring.next_rank", "cp_comms:Ring.prev_rank", layout="1x1x3x1", born=FORWARD)
def ring_turns_the_other_way(neighbour: Any) -> Any:
    """Keys and values go to the previous rank, not to the next one."""

    def mirrored(self: Any) -> int:
        step = self.ranks.index(neighbour(self)) - self.index
        rank: int = self.ranks[(self.index - step) % self.size]
        return rank

    return mirrored


@fault("methods.call:_blocks", born=FORWARD)
def queries_see_later_shards(blocks: Any) -> Any:
    """The causal mask holds within a shard and not across shards."""

    def across(mask: Any, rows: Any, keys: Any, *rest: Any) -> Any:
        return blocks(mask if rows == keys else replace(mask, causal=False), rows, keys, *rest)

    return across


@fault("methods.call:Call.blocks", born=FORWARD)
def last_block_skipped(blocks: Any) -> Any:
    """The last block that travels around the ring is left out."""

    def skipped(self: Any, source: int, **options: Any) -> Any:
        last = (self.ring.index + 1) % self.ring.size
        return () if source == last else blocks(self, source, **options)

    return skipped


@fault("methods.call:backward", born=BACKWARD)
def grouped_gradients_averaged(backward: Any) -> Any:
    """A key head's gradient is the mean over its query heads, not the sum."""

    def averaged(operands: Any, *rest: Any) -> Any:
        dq, dk, dv = backward(operands, *rest)
        group = operands.q.shape[1] // operands.k.shape[1]
        return dq, dk / group, dv / group

    return averaged


@fault("methods.call:merge_into", born=FORWARD)
def merge_loses_weight(merge: Any) -> Any:
    """Merging two blocks keeps the larger log-sum-exp in place of their sum."""

    def merged(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
        larger = torch.maximum(lse, block_lse)
        merge(out, lse, block_out, block_lse)
        lse.copy_(larger)

    return merged


@fault("methods.ring:_add_received", born=BACKWARD)
def own_share_overwritten(arrived: Any) -> Any:
    """What arrives of dK and dV replaces this rank's own share."""

    def replaced(share: Any, arriving: Any, comm: Any) -> Any:
        total = arrived(share, arriving, comm)
        return total if arriving is None else total - share

    return replaced


@fault("methods.call:backward", born=BACKWARD)
def softmax_rows_forgotten(backward: Any) -> Any:
    """Backward leaves out the row sums of the softmax's derivative."""

    def forgetful(operands: Any, *rest: Any) -> Any:
        return backward(operands._replace(out=torch.zeros_like(operands.out)), *rest)

    return forgetful


@fault("methods.call:merge_into", dtype="float32", born=FORWARD)
def statistics_in_bfloat16(merge: Any) -> Any:
    """Sums over keys and ranks are kept in bfloat16 where float32 is promised."""

    def merged(out: Tensor, lse: Tensor, *block: Tensor) -> None:
        merge(out, lse, *block)
        out.copy_(out.bfloat16())
        lse.copy_(lse.bfloat16())

    return merged


@fault("sequences:shard_batch", born="data: position_ids")
def positions_of_first_shard(shard: Any) -> Any:
    """Every context-parallel rank counts its positions from 0."""

    def restarted(batch: Any, group: Any, **options: Any) -> Any:
        shards = shard(batch, group, **options)
        return {**shards, "position_ids": shards["position_ids"] - shards["position_ids"][:, :1]}

    return restarted


@fault("sequences:shard_batch", born="data: labels")
def labels_shifted_within_shards(shard: Any) -> Any:
    """Labels are shifted within each shard, so that its last token has none."""

    def shortened(batch: Any, group: Any, **options: Any) -> Any:
        shards = shard(batch, group, **options)
        shards["labels"][:, -1] = -100
        return shards

    return shortened


@fault("models.settings:Settings._shard_layout", born=FORWARD)
def attention_in_another_layout(shard_layout: Any) -> Any:
    """Attention takes shards to be contiguous that are zigzag."""
    return lambda self, documents, length: contiguous(length * self.ring.size, self.ring.size)


@fault("methods.ulysses:_Swap._heads_of", cp_method="ulysses", born=FORWARD)
def heads_of_another_rank(heads_of: Any) -> Any:
    """Ranks get each other's heads, and give them back as their own."""
    return lambda self, x, peer: heads_of(self, x, self.ranks.size - 1 - peer)
