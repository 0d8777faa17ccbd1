"""All-gather attention: every rank gathers all keys and values, and attends with its own queries.

Simple, and quick if K and V are small beside Q (grouped heads) or shards are short; memory for
K and V is that of the whole sequence. They are under way while a rank attends to its own keys. In
backward they are gathered again, and the gradients of all ranks' keys and values are summed and
scattered in float32 at least.

Sent per rank and call, with M bytes of K and V on a rank and elements of e bytes: (N − 1)·M
forward, (N − 1)·M·(1 + 4/e) backward (8/e in float64).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ....dist import all_gather
from ....dist.building import reduce_scatter_flat
from ..cp_comms import Ring
from .call import Call, Saved, WithSinks, attend_all, no_gradient, of_sinks


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved]:
    """Return this rank's output [B, H, L, D] in q's dtype, and what backward needs."""
    return attend_all(_gathered(k, v, call.ring), q, k, v, call)


def backward(grad_out: Tensor, saved: Saved, call: Call) -> WithSinks:
    """Return dq, dk, dv and of sinks of this rank's shards, in float32 at least."""
    q, k, v, out, lse = saved
    dq, shards = no_gradient(q), no_gradient(k, call.ring.size, 2)
    for source, keys, values in _gathered(k, v, call.ring):
        totals = dq, shards[source, 0], shards[source, 1]
        call.attend_backward(source, grad_out, (q, keys, values, out, lse), totals)
    dk, dv = _summed(shards, call.ring)
    return dq, dk, dv, of_sinks(grad_out, saved, call)


def _gathered(k: Tensor, v: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield whose keys and values are here: this rank's own while all others' are under way."""
    k, v = k.contiguous(), v.contiguous()
    works = [all_gather(x, ring.group, async_op=True) for x in (k, v)] if ring.size > 1 else []
    yield ring.index, k, v
    both = [work.wait() for work in works]
    for step in range(1, ring.size):
        source = (ring.index + step) % ring.size
        yield source, both[0][source], both[1][source]


def _summed(shards: Tensor, ring: Ring) -> Tensor:
    """Sum every rank's `shards` [N, ...], and give each rank its own."""
    if ring.group is None or ring.size == 1:
        return shards[0]
    counts = [shards[0].numel()] * ring.size
    work = reduce_scatter_flat(shards.reshape(-1), counts, group=ring.group)
    return work.wait().view(shards.shape[1:])
