"""Ulysses: ranks exchange positions for heads, so that each has all positions of some heads.

A rank of a part of U neighbours gets all the part's positions of H / U query heads and of the
key/value heads that these use, and gives the output back the same way. If the part is all
ranks, that is whole attention, and any kernel will do; otherwise ("hybrid") a ring of the N / U
parts goes on with the positions that each part has, and heads need not be as many as ranks. If
there are fewer key/value heads than ranks in a part each goes to several, whose gradients are
summed.

Sent per rank and call, with Q and O bytes of queries and output and M of K and V on a rank:
(Q + O + M) · (U − 1) / U forward and again backward; M counts as often as a key/value head is
replicated, and dQ, dK and dV travel in float32 at least. A ring across N / U parts sends M as
often as it has hops, N / U − 1, as `ring` says. See https://arxiv.org/abs/2309.14509 and, for
the two together, https://arxiv.org/abs/2405.07719.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from ..kernels import statistics_dtype
from ..layouts.layout import joined
from . import ring
from .call import Call, Saved, WithSinks
from .swap import Swap

PIECES = 4  # heads travel in so many pieces at most; the first and the last are not hidden


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved]:
    """Return this rank's output [B, H, L, D] in q's dtype, and what backward needs."""
    if call.parts[0].size == 1:
        return ring.forward(q, k, v, call)
    swap, inner = _of_parts(call)
    out = _rooms(q, (q.shape[1],), q.dtype, swap)
    saved: Saved = ()
    leaving = []
    for piece, (queries, keys, values) in _arriving((q, k, v), swap):
        part, kept = ring.forward(queries, keys, values, _of_heads(inner, swap, piece))
        leaving.append(swap.to_positions((part,), out, piece))
        saved += kept
    for work in leaving:
        work.wait()
    return out[0].flatten(1, 2), saved


def backward(grad_out: Tensor, saved: Saved, call: Call) -> WithSinks:
    """Return dq, dk, dv of this rank's positions and its part of sinks', in float32 at least."""
    if call.parts[0].size == 1:
        return ring.backward(grad_out, saved, call)
    swap, inner = _of_parts(call)
    heads, kv_heads = grad_out.shape[1], max(call.kv_heads, swap.part.size)
    grads = _rooms(grad_out, (heads, kv_heads, kv_heads), statistics_dtype(grad_out.dtype), swap)
    sinks = None if call.sinks is None else torch.zeros_like(call.sinks)
    leaving = []
    for piece, (grad,) in _arriving((grad_out,), swap):
        part = _of_heads(inner, swap, piece)
        *parts, of_sinks = ring.backward(grad, saved[5 * piece : 5 * piece + 5], part)
        leaving.append(swap.to_positions(tuple(parts), grads, piece))
        if sinks is not None and of_sinks is not None:
            swap.own_heads(sinks, piece).copy_(of_sinks)
    for work in leaving:
        work.wait()
    dq, dk, dv = (x.flatten(1, 2) for x in grads)
    return dq, _summed(dk, call.kv_heads), _summed(dv, call.kv_heads), sinks


def _arriving(tensors: tuple[Tensor, ...], swap: Swap) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield a piece of this rank's heads of all positions while the next is under way."""
    coming = swap.to_heads(tensors, 0)
    for piece in range(swap.pieces):
        here, work = coming
        work.wait()
        if piece + 1 < swap.pieces:
            coming = swap.to_heads(tensors, piece + 1)
        yield piece, here


def _rooms(
    x: Tensor, counts: tuple[int, ...], dtype: torch.dtype, swap: Swap
) -> tuple[Tensor, ...]:
    """Return room for the heads of all ranks, [B, U, heads / U, L, D] for each count."""
    batch, _, length, dim = x.shape
    size = swap.part.size
    shapes = [(batch, size, heads // size, length, dim) for heads in counts]
    return tuple(x.new_empty(shape, dtype=dtype) for shape in shapes)


def _of_parts(call: Call) -> tuple[Swap, Call]:
    """Return the exchange of a part, and the call of the ring across parts."""
    part, across = call.parts
    layout = joined(call.layout, part.size)
    first = across.index * part.size
    shards = call.layout.ranks[first : first + part.size]
    pieces = gcd(PIECES, max(1, call.kv_heads // part.size))
    swap = Swap(part, shards, layout.ranks[across.index], pieces)
    return swap, replace(call, layout=layout, ring=across)


def _of_heads(inner: Call, swap: Swap, piece: int) -> Call:
    """Return the call of a piece of this rank's heads."""
    if inner.sinks is None:
        return inner
    return replace(inner, sinks=swap.own_heads(inner.sinks, piece))


def _summed(grad: Tensor, kv_heads: int) -> Tensor:
    """Return the gradients of replicated heads [B, K · copies, L, D] summed, [B, K, L, D]."""
    return grad if grad.shape[1] == kv_heads else grad.unflatten(1, (kv_heads, -1)).sum(2)
