"""Ulysses: ranks exchange positions for heads, and each attends over the whole sequence.

Every rank gets all positions of H / N query heads and of the key/value heads that these use, and
gives the output back the same way: a head is never divided, so any kernel will do. Where there
are fewer key/value heads than ranks each goes to several, whose gradients are summed.

Sent per rank and call, with Q and O bytes of queries and output and M of K and V on a rank:
(Q + O + M) · (N − 1) / N forward and again backward; M counts as often as a key/value head is
replicated, and dK and dV travel in float32 where they are. See https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ....dist import functional
from ....dist.errors import InvalidArgumentError
from ..cp_comms import Ring
from ..layouts import contiguous
from .call import Call, Gradients, Saved, no_gradient, nothing_seen


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved]:
    """Return this rank's output [B, H, L, D] in q's dtype, and what backward needs."""
    whole, copies = _whole(call), _copies(k, call.ring)
    k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    q, k, v = (_to_heads(x, call) for x in (q, k, v))
    out, lse = nothing_seen(q)
    whole.attend(0, q, k, v, out, lse)
    out = out.to(q.dtype)
    return _to_positions(out, call), (q, k, v, out, lse)


def backward(grad_out: Tensor, saved: Saved, call: Call) -> Gradients:
    """Return dq, dk, dv of this rank's positions, in float32 at least."""
    whole, grad_out = _whole(call), _to_heads(grad_out, call)
    q, k, v, _, _ = saved
    grads = no_gradient(q), no_gradient(k), no_gradient(v)
    whole.attend_backward(0, grad_out, saved, grads)
    dq, dk, dv = (_to_positions(grad, call) for grad in grads)
    copies = dk.shape[1] // call.kv_heads
    return dq, *(x.unflatten(1, (-1, copies)).sum(2) for x in (dk, dv))


def _whole(call: Call) -> Call:
    """Return the call of one rank that has all positions."""
    alone = Ring(None, (0,), 0)
    return replace(call, layout=contiguous(call.layout.length, 1), ring=alone)


def _copies(k: Tensor, ring: Ring) -> int:
    """Return to how many ranks each key/value head goes."""
    return max(1, ring.size // k.shape[1])


def _to_heads(x: Tensor, call: Call) -> Tensor:
    """Give heads for positions: [B, H, L, D] to [B, H / N, whole length, D], in order."""
    joined = functional.all_to_all(x, 1, 2, call.ring.group)
    return joined.index_select(2, call.layout.order(x.device))


def _to_positions(x: Tensor, call: Call) -> Tensor:
    """Give positions for heads, the way back; padding is zero."""
    batch, heads, _, dim = x.shape
    padded = x.new_zeros((batch, heads, call.layout.padded_length, dim))
    padded.index_copy_(2, call.layout.order(x.device), x)
    return functional.all_to_all(padded, 2, 1, call.ring.group)


def check_heads(q: Tensor, k: Tensor, size: int) -> None:
    """Check that query heads divide over `size` ranks, and key/value heads with them.

    Raises:
        InvalidArgumentError: They do not.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads % size or (kv_heads % size and size % kv_heads):
        raise InvalidArgumentError(
            f"Ulysses divides heads over {size} ranks: their number must be a multiple of that, "
            f"and key/value heads a multiple or a divisor; there are {heads} and {kv_heads}; "
            "method='ring' takes any"
        )
