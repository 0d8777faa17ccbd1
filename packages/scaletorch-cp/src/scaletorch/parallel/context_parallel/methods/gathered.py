"""All-gather attention: every rank gathers all keys and values, and attends with its own queries.

Simple, and quick where K and V are small beside Q (grouped heads); memory for K and V is that of
the whole sequence. In backward they are gathered again, and the gradients of all ranks' keys and
values are summed and scattered in float32 at least.

Sent per rank and call, with M bytes of K and V on a rank and elements of e bytes: (N − 1)·M
forward, (N − 1)·M·(1 + 4/e) backward (8/e in float64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....dist import functional
from ..cp_comms import Ring
from .call import Call, Gradients, Saved, no_gradient, nothing_seen


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved]:
    """Return this rank's output [B, H, L, D] in q's dtype, and what backward needs."""
    out, lse = nothing_seen(q)
    for source, (keys, values) in enumerate(_gather(k, v, call.ring)):
        call.attend(source, q, keys, values, out, lse)
    out = out.to(q.dtype)
    return out, (q, k, v, out, lse)


def backward(grad_out: Tensor, saved: Saved, call: Call) -> Gradients:
    """Return dq, dk, dv of this rank's shares, in float32 at least."""
    q, k, v, out, lse = saved
    dq, shares = no_gradient(q), no_gradient(k, call.ring.size, 2)
    for source, (keys, values) in enumerate(_gather(k, v, call.ring)):
        call.attend_backward(source, grad_out, (q, keys, values, out, lse), (dq, *shares[source]))
    dk, dv = functional.reduce_scatter(shares, 0, call.ring.group)[0]
    return dq, dk, dv


def _gather(k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """Return all ranks' keys and values, [N, 2, B, K, L, D]."""
    return functional.all_gather(torch.stack((k, v))[None], 0, ring.group)
