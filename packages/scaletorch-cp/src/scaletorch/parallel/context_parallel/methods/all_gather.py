"""All-gather attention: every rank gathers all keys and values, and attends with its own queries.

Simple, and fast if K and V are smaller than Q (grouped heads) or shards are short. K and V take the
memory of the whole sequence. They are in flight while a rank attends to its own keys. Backward
gathers them again, and reduce-scatters the gradients of K and V in float32 at least.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ....dist import all_gather
from ....dist.building import reduce_scatter_flat
from ..cp_comms import Ring
from .call import Call, Saved, WithSinks, attend_all, sink_gradient, zero_totals


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved]:
    """Return this rank's output [B, H, L, D] in q's dtype, and the tensors for backward."""
    return attend_all(_gather(k, v, call.ring), q, k, v, call)


def backward(grad_out: Tensor, saved: Saved, call: Call) -> WithSinks:
    """Return dq, dk, dv and dsinks of this rank's shards, in float32 at least."""
    q, k, v, out, lse = saved
    dq, shards = zero_totals(q), zero_totals(k, call.ring.size, 2)
    for source, keys, values in _gather(k, v, call.ring):
        totals = dq, shards[source, 0], shards[source, 1]
        call.attend_backward(source, grad_out, (q, keys, values, out, lse), totals)
    dk, dv = _reduce_scatter(shards, call.ring)
    return dq, dk, dv, sink_gradient(grad_out, saved, call)


def _gather(k: Tensor, v: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each rank's index, keys and values, its own first while the others are in flight."""
    k, v = k.contiguous(), v.contiguous()
    works = [all_gather(x, ring.group, async_op=True) for x in (k, v)] if ring.size > 1 else []
    yield ring.index, k, v
    both = [work.wait() for work in works]
    for step in range(1, ring.size):
        source = (ring.index + step) % ring.size
        yield source, both[0][source], both[1][source]


def _reduce_scatter(shards: Tensor, ring: Ring) -> Tensor:
    """Sum every rank's `shards` [N, ...], and return this rank's shard of the sum."""
    if ring.group is None or ring.size == 1:
        return shards[0]
    counts = [shards[0].numel()] * ring.size
    work = reduce_scatter_flat(shards.reshape(-1), counts, group=ring.group)
    return work.wait().view(shards.shape[1:])
