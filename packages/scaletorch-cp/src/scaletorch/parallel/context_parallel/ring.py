"""Ring attention: each rank keeps its queries while keys and values travel around the ring.

In step s rank r holds the keys and values of rank r − s, and the next ones are under way while
it computes. The results of the blocks are merged by their log-sum-exp. In backward keys and
values travel again, and each block's gradients travel one step behind them: they start on the
rank after the owner, which keeps its own share at home, and come home after N − 1 hops.

Sent per rank and call, with M bytes of K and V on a rank and elements of e bytes: (N − 1)·M
forward, (N − 1)·M·(1 + 4/e) backward (8/e in float64).
See https://arxiv.org/abs/2310.01889.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .blocks import block_backward, block_forward, row_delta, statistics_dtype, update_out_and_lse
from .cp_comms import ContextCommunicate, Ring


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries over the keys and values of every rank of the ring.

    `RingAttention.apply(q, k, v, scale, causal, ring)` with arguments that were checked and are
    alike on all ranks; `ring_attention` is the public face. Backward communicates: every rank
    of the ring must run it, in the same order.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, ring: Ring
    ) -> Tensor:
        """Return the output [B, H, L, D] in q's dtype."""
        with torch.autocast(q.device.type, enabled=False):
            out, lse = ring_forward(q, k, v, scale, causal, ring)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.causal, ctx.ring = scale, causal, ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v in their dtypes."""
        q, k, v, out, lse = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            grads = ring_backward(grad_out, q, k, v, out, lse, ctx.scale, ctx.causal, ctx.ring)
        return (*(grad.to(q.dtype) for grad in grads), None, None, None)


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, ring: Ring
) -> tuple[Tensor, Tensor]:
    """Return out [B, H, L, D] and lse [B, H, L] over the whole sequence, in float32 at least."""
    dtype = statistics_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
    for step, keys, values in _travelling(k, v, ring):
        if _sees(step, causal, ring):
            block = block_forward(q, keys, values, scale, causal and step == 0)
            out, lse = update_out_and_lse(out, lse, *block)
    return out, lse


def ring_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    ring: Ring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of this rank's shards, in float32 at least."""
    dtype = statistics_dtype(q.dtype)
    delta = row_delta(grad_out, out)
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    home = torch.zeros((2, *k.shape), dtype=dtype, device=k.device)
    arriving: Tensor | None = None
    comm = ContextCommunicate("gradients of keys and values", ring.group)
    for step, keys, values in _travelling(k, v, ring):
        share = home if step == 0 else torch.zeros_like(home)
        if _sees(step, causal, ring):
            dq_share, *shares = block_backward(
                grad_out, q, keys, values, lse, delta, scale, causal and step == 0
            )
            dq += dq_share
            torch.stack(shares, out=share)
        if step > 0:
            arriving = _pass_on(_with_arrived(share, arriving, comm), comm)
    dk, dv = _with_arrived(home, arriving, comm)
    return dq, dk, dv


def _sees(step: int, causal: bool, ring: Ring) -> bool:
    """Tell whether this rank's queries see the keys of rank index − step."""
    return not causal or step <= ring.index


def _travelling(k: Tensor, v: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each step's keys and values while the next step's are under way, as one message."""
    comm = ContextCommunicate("keys and values", ring.group)
    both = torch.stack((k, v))
    for step in range(ring.size - 1):
        arriving = _pass_on(both, comm)
        yield step, both[0], both[1]
        comm.wait()
        both = arriving
    yield ring.size - 1, both[0], both[1]


def _pass_on(tensor: Tensor, comm: ContextCommunicate) -> Tensor:
    """Start to send this to the next rank; return where the previous rank's will arrive."""
    arriving = comm.send_recv(tensor)
    comm.commit()
    return arriving


def _with_arrived(share: Tensor, arriving: Tensor | None, comm: ContextCommunicate) -> Tensor:
    """Add what the previous rank passed on, if anything is under way, to this rank's share."""
    if arriving is None:
        return share
    comm.wait()
    return arriving.add_(share)
