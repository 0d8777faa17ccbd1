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

import torch
from torch import Tensor

from ..cp_comms import ContextCommunicate, Ring
from .call import Call, Gradients, Saved, no_gradient, nothing_seen


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved]:
    """Return this rank's output [B, H, L, D] in q's dtype, and what backward needs."""
    out, lse = nothing_seen(q)
    for source, keys, values in _travelling(k, v, call.ring):
        call.attend(source, q, keys, values, out, lse)
    out = out.to(q.dtype)
    return out, (q, k, v, out, lse)


def backward(grad_out: Tensor, saved: Saved, call: Call) -> Gradients:
    """Return dq, dk, dv of this rank's shares, in float32 at least."""
    q, k, v, out, lse = saved
    dq, home = no_gradient(q), no_gradient(k, 2)
    arriving: Tensor | None = None
    comm = ContextCommunicate("gradients of keys and values", call.ring)
    for source, keys, values in _travelling(k, v, call.ring):
        own = source == call.ring.index
        share = home if own else torch.zeros_like(home)
        call.attend_backward(source, grad_out, (q, keys, values, out, lse), (dq, *share))
        if not own:
            arriving = _pass_on(_with_arrived(share, arriving, comm), comm)
    dk, dv = _with_arrived(home, arriving, comm)
    return dq, dk, dv


def _travelling(k: Tensor, v: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield whose keys and values are here while the next are under way, as one message."""
    comm = ContextCommunicate("keys and values", ring)
    both = torch.stack((k, v))
    for step in range(ring.size - 1):
        arriving = _pass_on(both, comm)
        yield (ring.index - step) % ring.size, both[0], both[1]
        comm.wait()
        both = arriving
    yield (ring.index + 1) % ring.size, both[0], both[1]


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
