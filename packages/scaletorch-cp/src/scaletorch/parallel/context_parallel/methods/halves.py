"""The backward of a rank's own keys in two halves: one to begin with, one to end with.

Own keys and values need no message, so that the one half is computed while the first keys and
values of others are under way, and the other while the last gradients are.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from .call import Call, Gradients, Saved


def early(grad_out: Tensor, saved: Saved, totals: Gradients, call: Call) -> None:
    """Add the gradients of attention over the later half of this rank's keys, in place.

    They are the smaller half of the work where attention is causal, as what follows it, keys and
    values, is the smaller message. Where there is one rank, nothing is left for `late`.
    """
    _add(slice(_middle(call), None), grad_out, saved, totals, call)


def late(grad_out: Tensor, saved: Saved, totals: Gradients, call: Call) -> None:
    """Add the gradients of attention over the earlier half of this rank's keys, in place."""
    _add(slice(0, _middle(call)), grad_out, saved, totals, call)


def _middle(call: Call) -> int:
    return call.layout.local_length // 2 if call.ring.size > 1 else 0


def _add(half: slice, grad_out: Tensor, saved: Saved, totals: Gradients, call: Call) -> None:
    """Add the gradients of attention over these of this rank's keys, as over one more source."""
    ranks = call.layout.ranks
    keys = _cut(ranks[call.ring.index], half)
    part = replace(call, layout=replace(call.layout, ranks=(*ranks, keys)))
    q, k, v, out, lse = saved
    dq, dk, dv = totals
    saved, totals = (
        (q, k[:, :, half], v[:, :, half], out, lse),
        (dq, dk[:, :, half], dv[:, :, half]),
    )
    part.attend_backward(len(ranks), grad_out, saved, totals)


def _cut(share: tuple[range, ...], half: slice) -> tuple[range, ...]:
    """Return what of a share's runs lies in a slice of its local indices."""
    wanted = range(sum(map(len, share)))[half]
    start = 0
    runs = []
    for run in share:
        runs.append(run[max(wanted.start - start, 0) : max(wanted.stop - start, 0)])
        start += len(run)
    return tuple(runs)
