"""Attention over one block of keys by plain matrix products: any band, dtype, device and cap.

Scores exist one tile at a time: some rows of some heads, with the keys that these rows can see.
So memory is linear in the block's length, and keys that no row sees are not computed. Everything is
computed and returned in float32, or float64 for float64. The heads of a group become rows of one
matrix product, so K and V are never expanded and a group's gradients are summed in float32.

Shapes; B and K become one dim of U key/value heads, with G query heads each:

    q, out, grad_out, dq   [B, H, L, D], inside [U, G, L, D]
    k, v, dk, dv           [B, K, S, D], inside [U, S, D]; v may have another head dim
    lse                    [B, H, L], inside [U, G, L]; natural logarithm

The formulas are those of FlashAttention-2 (https://arxiv.org/abs/2307.08691).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import Band, visible_keys, visible_rows
from .block import Gradients, Operands, statistics_dtype, without_empty_rows


class Size(NamedTuple):
    """The size of a tile."""

    rows: int  # number of query rows, over all heads of a group
    scores: int  # maximum number of scores, unless these rows have more with one head


# A core's cache holds two tiles; sizes from half to four times as large were no faster.
# Devices need few large kernels: 128 MiB in float32 (not measured on any).
SIZES = {"cpu": Size(128, 1 << 18)}
DEVICE_SIZE = Size(1024, 1 << 25)


class _Tile(NamedTuple):
    """Query rows of some key/value heads' groups, and the keys that any of these rows sees."""

    heads: slice
    rows: slice
    keys: slice


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend `q` to one block of keys: see `forward` of the package."""
    queries, keys, values = _grouped(q, k), _flat(k), _flat(v)
    out = queries.new_zeros((*queries.shape[:3], v.shape[-1]))
    lse = queries.new_full(queries.shape[:3], -torch.inf)
    for tile in _tiles(queries, keys, band):
        scores = _scores(_rows(queries, tile) * scale, keys, band, tile, cap)
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        _write(out, (weights @ values[tile.heads, tile.keys]).div_(total), tile)
        _write(lse, top.add_(total.log_()).squeeze(-1), tile)
    return out.view(*q.shape[:3], v.shape[-1]), lse.view(q.shape[:3])


def backward(x: Operands, scale: float, band: Band, cap: float | None = None) -> Gradients:
    """Return one block's term of the gradients: see `backward` of the package."""
    grad_out, q, k, v, out, lse = x
    queries, keys, values = _grouped(q, k), _flat(k), _flat(v)
    grads, lses = _grouped(grad_out, k), _grouped(without_empty_rows(lse).unsqueeze(-1), k)
    delta = (grads * _grouped(out, k)).sum(-1, keepdim=True)
    dq, dk, dv = (
        torch.zeros_like(each, memory_format=torch.contiguous_format)
        for each in (queries, keys, values)
    )
    for tile in _tiles(queries, keys, band):
        heads, seen = tile.heads, tile.keys
        q_rows, grad_rows = _rows(queries, tile) * scale, _rows(grads, tile)
        scores = _scores(q_rows, keys, band, tile, cap)
        slopes = None if cap is None else _cap_slopes(scores, cap)
        weights = scores.sub_(_rows(lses, tile)).exp_()
        dv[heads, seen].baddbmm_(weights.mT, grad_rows)
        d_scores = grad_rows @ values[heads, seen].mT
        d_scores.sub_(_rows(delta, tile)).mul_(weights)
        if slopes is not None:
            d_scores.mul_(slopes)
        _write(dq, (d_scores @ keys[heads, seen]).mul_(scale), tile)
        dk[heads, seen].baddbmm_(d_scores.mT, q_rows)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _tiles(queries: Tensor, keys: Tensor, band: Band) -> Iterator[_Tile]:
    heads, group, length, _ = queries.shape
    size = SIZES.get(queries.device.type, DEVICE_SIZE)
    step = max(1, size.rows // group)
    visible = visible_rows(band, length, keys.shape[1])
    for top in visible[::step]:
        rows = range(top, min(top + step, visible.stop))
        seen = visible_keys(band, rows, keys.shape[1])
        count = max(1, size.scores // (group * len(rows) * len(seen)))
        for first in range(0, heads, count):
            some = slice(first, min(first + count, heads))
            yield _Tile(some, slice(rows.start, rows.stop), slice(seen.start, seen.stop))


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Return x [B, H, L, *] as [U, G, L, *], in `statistics_dtype`."""
    return _flat(x.unflatten(1, (k.shape[1], -1)))


def _flat(x: Tensor) -> Tensor:
    """Return x with its first two dims as one, in `statistics_dtype`."""
    return x.to(statistics_dtype(x.dtype)).flatten(0, 1)


def _rows(x: Tensor, tile: _Tile) -> Tensor:
    """Return a tile's rows of x [U, G, L, *] as [heads, G · rows, *]."""
    return x[tile.heads, :, tile.rows].flatten(1, 2)


def _write(x: Tensor, rows: Tensor, tile: _Tile) -> None:
    """Write rows [heads, G · rows, *] into x [U, G, L, *]."""
    x[tile.heads, :, tile.rows] = rows.unflatten(1, (x.shape[1], -1))


def _scores(q_rows: Tensor, keys: Tensor, band: Band, tile: _Tile, cap: float | None) -> Tensor:
    """Return scores [heads, G · rows, keys] of scaled rows, −inf if a row does not see a key."""
    scores = q_rows @ keys[tile.heads, tile.keys].mT
    if cap is not None:
        scores.div_(cap).tanh_().mul_(cap)
    height = tile.rows.stop - tile.rows.start
    _mask_scores(scores.unflatten(1, (-1, height)), band, tile.rows.start - tile.keys.start)
    return scores


def _cap_slopes(scores: Tensor, cap: float) -> Tensor:
    """Return the derivative of the cap at capped scores, 0 if a row does not see a key."""
    return scores.div(cap).clamp_(min=-1.0).square_().neg_().add_(1.0)


def _mask_scores(scores: Tensor, band: Band, shift: int) -> None:
    """Write −inf into a tile's scores; `shift` is its first row minus its first key."""
    lower, upper = band
    if upper is not None:
        # The first row sees no key from `first` on.
        first = max(0, shift + upper + 1)
        edge = scores[..., first:]
        edge.masked_fill_(_ones(edge).triu_(shift + upper + 1 - first), -torch.inf)
    if lower is not None:
        # The last row sees no key of this edge.
        edge = scores[..., : max(0, shift + lower + scores.shape[-2] - 1)]
        edge.masked_fill_(_ones(edge).tril_(shift + lower - 1), -torch.inf)


def _ones(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
