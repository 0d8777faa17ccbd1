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

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..cp_comms import ContextCommunicate, Ring
from .call import (
    Call,
    Saved,
    WithSinks,
    attend_all,
    attend_once,
    attend_once_backward,
    no_gradient,
    of_sinks,
)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved]:
    """Return this rank's output [B, H, L, D] in q's dtype, and what backward needs."""
    only = call.only_block(q)
    if only is not None:
        return attend_once(q, k, v, only.band, call)
    return attend_all(_travelling(k, v, call.ring), q, k, v, call)


def backward(grad_out: Tensor, saved: Saved, call: Call) -> WithSinks:
    """Return dq, dk, dv and of sinks of this rank's shares, in float32 at least if several add."""
    q, k, v, out, lse = saved
    only = call.only_block(q)
    if only is not None:
        return attend_once_backward(grad_out, saved, only.band, call)
    dq, home = no_gradient(q), no_gradient(k, 2)
    share: Tensor | None = None
    sent: Tensor | None = None
    arriving: Tensor | None = None
    comm = ContextCommunicate("gradients of keys and values", call.ring)
    for source, keys, values in _travelling(k, v, call.ring):
        if source == call.ring.index:
            call.attend_backward(source, grad_out, saved, (dq, *home))
            continue
        # What was sent last is still under way: its memory is not free for this share.
        share = torch.zeros_like(home) if share is None or share is sent else share.zero_()
        call.attend_backward(source, grad_out, (q, keys, values, out, lse), (dq, *share))
        total = _with_arrived(share, arriving, comm)
        (arriving,) = _pass_on([total], comm, [sent])
        sent = total
    dk, dv = _with_arrived(home, arriving, comm)
    return dq, dk, dv, of_sinks(grad_out, saved, call)


def _travelling(k: Tensor, v: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield whose keys and values are here while the next are under way.

    They are here until the next step, which receives into their memory.
    """
    comm = ContextCommunicate("keys and values", ring)
    here = [k.contiguous(), v.contiguous()]
    free: Sequence[Tensor | None] = [None, None]
    for step in range(ring.size - 1):
        arriving = _pass_on(here, comm, free)
        yield (ring.index - step) % ring.size, here[0], here[1]
        comm.wait()
        free = here if step else free  # at first they are the caller's
        here = arriving
    yield (ring.index + 1) % ring.size, here[0], here[1]


def _pass_on(
    tensors: Sequence[Tensor], comm: ContextCommunicate, free: Sequence[Tensor | None]
) -> list[Tensor]:
    """Start to send these to the next rank, as one batch; return where the previous one's arrive.

    Args:
        tensors: What to send.
        comm: The ring.
        free: Where to receive; None is a new tensor.
    """
    arriving = [comm.send_recv(x, into) for x, into in zip(tensors, free, strict=True)]
    comm.commit()
    return arriving


def _with_arrived(share: Tensor, arriving: Tensor | None, comm: ContextCommunicate) -> Tensor:
    """Add the previous rank's message, if one is under way, to this rank's share."""
    if arriving is None:
        return share
    comm.wait()
    return arriving.add_(share)
