"""Ring attention: each rank keeps its queries while keys and values travel around the ring.

In step s rank r holds the keys and values of rank r − s, and the next ones are in flight while it
computes. The results of the blocks are merged by their log-sum-exp. In backward keys and values
travel again, and each block's gradients travel one step behind them. They start on the rank after
the owner and reach the owner after N − 1 hops; the owner adds its own contribution at the end.
See https://arxiv.org/abs/2310.01889.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..cp_comms import ContextCommunicate, Ring
from .call import Call, Saved, WithSinks, attend_all, sink_gradient, zero_totals


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved]:
    """Return this rank's output [B, H, L, D] in q's dtype, and the tensors for backward."""
    return attend_all(_rotate(k, v, call.ring), q, k, v, call)


def backward(grad_out: Tensor, saved: Saved, call: Call) -> WithSinks:
    """Return this rank's dq, dk, dv and dsinks, in float32 at least if there are several blocks."""
    single = call.single_backward(grad_out, saved)
    if single is not None:
        return single
    q, k, v, out, lse = saved
    dq, dkv = zero_totals(q), zero_totals(k, 2)
    block: Tensor | None = None
    sent: Tensor | None = None
    arriving: Tensor | None = None
    comm = ContextCommunicate("gradients of keys and values", call.ring)
    for source, keys, values in _rotate(k, v, call.ring):
        if source == call.ring.index:
            call.attend_backward(source, grad_out, saved, (dq, *dkv))
            continue
        # The memory of the last message is still in use: it cannot hold this block's gradients.
        block = torch.zeros_like(dkv) if block is None or block is sent else block.zero_()
        call.attend_backward(source, grad_out, (q, keys, values, out, lse), (dq, *block))
        total = _add_received(block, arriving, comm)
        (arriving,) = _pass_on([total], comm, [sent])
        sent = total
    dk, dv = _add_received(dkv, arriving, comm)
    return dq, dk, dv, sink_gradient(grad_out, saved, call)


def _rotate(k: Tensor, v: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each rank's index, keys and values while the next ones are in flight.

    They are valid until the next step, which receives into their memory.
    """
    comm = ContextCommunicate("keys and values", ring)
    current = [k.contiguous(), v.contiguous()]
    free: Sequence[Tensor | None] = [None, None]
    for step in range(ring.size - 1):
        arriving = _pass_on(current, comm, free)
        yield (ring.index - step) % ring.size, current[0], current[1]
        comm.wait()
        free = current if step else free  # the first ones are the caller's
        current = arriving
    yield (ring.index + 1) % ring.size, current[0], current[1]


def _pass_on(
    tensors: Sequence[Tensor], comm: ContextCommunicate, free: Sequence[Tensor | None]
) -> list[Tensor]:
    """Start sending tensors to the next rank; return those received: `free` ones or new ones."""
    arriving = [comm.send_recv(x, into) for x, into in zip(tensors, free, strict=True)]
    comm.commit()
    return arriving


def _add_received(block: Tensor, arriving: Tensor | None, comm: ContextCommunicate) -> Tensor:
    """Add this rank's contribution to the message in flight from the previous rank, if any."""
    if arriving is None:
        return block
    comm.wait()
    return arriving.add_(block)
