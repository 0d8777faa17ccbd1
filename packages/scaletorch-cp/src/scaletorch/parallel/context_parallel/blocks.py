"""Attention of queries over one block of keys: forward to (out, lse), backward, and the merge.

Shapes, with H query heads in groups over K key/value heads (H a multiple of K):

    q, out, grad_out   [B, H, L, D]
    k, v               [B, K, S, D]
    lse, delta         [B, H, L]      log of the sum of exponentials, natural logarithm

Scores exist one tile of query rows at a time, so memory is linear in L and S. Everything is
computed and returned in float32, in float64 for float64: blocks' results can then be summed
over any number of ranks without the error growing. The heads of a group become rows of one
matrix product, so K and V are never expanded and a group's gradients are summed in float32.

The formulas are those of FlashAttention-2 (https://arxiv.org/abs/2307.08691).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Scores in one tile: enough for efficient matrix products, 8 MiB in float32.
TILE_SCORES = 1 << 21


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over keys and over ranks are kept for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attend `q` to one block of keys.

    Args:
        q: Queries [B, H, L, D].
        k: Keys [B, K, S, D].
        v: Values [B, K, S, D].
        scale: Factor of the scores.
        causal: Row i sees keys 0..i, which asks for L = S; else every row sees every key.

    Returns:
        out [B, H, L, D] and lse [B, H, L], both in `statistics_dtype`.
    """
    dtype = statistics_dtype(q.dtype)
    k, v = k.to(dtype), v.to(dtype)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)
    for tile in _tiles(q, k, causal):
        scores = _scores(_rows(q, tile, dtype), k, scale, tile)
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        tile_out = (weights @ v[:, :, : tile.keys]).div_(total)
        out[:, :, tile.start : tile.stop] = _ungroup(tile_out, tile)
        lse[:, :, tile.start : tile.stop] = _ungroup(top.add_(total.log_()), tile).squeeze(-1)
    return out, lse


def block_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one block's share of the gradients of attention over several blocks.

    With `lse` and `delta` of the *merged* result, the sum of all blocks' shares is exact.

    Args:
        grad_out: Gradient of the merged output [B, H, L, D].
        q: Queries [B, H, L, D].
        k: The block's keys [B, K, S, D].
        v: The block's values [B, K, S, D].
        lse: Merged log-sum-exp [B, H, L].
        delta: Row sums of `grad_out` times the merged output, of `row_delta` [B, H, L].
        scale: Factor of the scores.
        causal: As in `block_forward`.

    Returns:
        dq, dk, dv in the shapes of q, k, v and in `statistics_dtype`.
    """
    dtype = statistics_dtype(q.dtype)
    k, v = k.to(dtype), v.to(dtype)
    dq = torch.empty(q.shape, dtype=dtype, device=q.device)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    # A row that sees nothing has lse −inf; its weights must come out 0, not NaN.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    for tile in _tiles(q, k, causal):
        q_rows, grad_rows = _rows(q, tile, dtype), _rows(grad_out, tile, dtype)
        scores = _scores(q_rows, k, scale, tile)
        weights = scores.sub_(_rows(lse.unsqueeze(-1), tile, dtype)).exp_()
        dv[:, :, : tile.keys] += weights.mT @ grad_rows
        d_scores = grad_rows @ v[:, :, : tile.keys].mT
        d_scores.sub_(_rows(delta.unsqueeze(-1), tile, dtype)).mul_(weights).mul_(scale)
        dq[:, :, tile.start : tile.stop] = _ungroup(d_scores @ k[:, :, : tile.keys], tile)
        dk[:, :, : tile.keys] += d_scores.mT @ q_rows
    return dq, dk, dv


def row_delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """Return the row sums [B, H, L] of `grad_out` times `out`, in `statistics_dtype`."""
    dtype = statistics_dtype(out.dtype)
    return (grad_out.to(dtype) * out.to(dtype)).sum(-1)


def update_out_and_lse(
    out: Tensor | None, lse: Tensor | None, block_out: Tensor, block_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over one more block of keys into the result over the blocks before.

    Rows of which neither side has seen anything (both lse −inf) keep out as it is and lse −inf.

    Args:
        out: Merged output so far [B, H, L, D]; None before the first block.
        lse: Its log-sum-exp [B, H, L]; None before the first block.
        block_out: The block's output [B, H, L, D].
        block_lse: The block's log-sum-exp [B, H, L].

    Returns:
        The new out and lse, in float32 (float64 for float64); no argument is changed.
    """
    dtype = statistics_dtype(block_lse.dtype)
    block_out, block_lse = block_out.to(dtype), block_lse.to(dtype)
    if out is None or lse is None:
        return block_out, block_lse
    out, lse = out.to(dtype), lse.to(dtype)
    # −inf minus −inf is NaN: such a row takes nothing of the block.
    gap = torch.where(block_lse == -torch.inf, block_lse, block_lse - lse)
    share = torch.sigmoid(gap).unsqueeze(-1)
    return out + share * (block_out - out), torch.logaddexp(lse, block_lse)


class _Tile(NamedTuple):
    """Query rows start..stop, the number of keys that they may see, and how heads are grouped."""

    start: int
    stop: int
    keys: int
    kv_heads: int
    causal: bool


def _tiles(q: Tensor, k: Tensor, causal: bool) -> Iterator[_Tile]:
    batch, heads, length, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    rows = max(1, TILE_SCORES // (batch * heads * keys))
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        yield _Tile(start, stop, stop if causal else keys, kv_heads, causal)


def _rows(x: Tensor, tile: _Tile, dtype: torch.dtype) -> Tensor:
    """Return a tile's rows of x [B, H, L, *] as [B, K, group · rows, *]."""
    rows = x[:, :, tile.start : tile.stop].to(dtype)
    return torch.unflatten(rows, 1, (tile.kv_heads, -1)).flatten(2, 3)


def _ungroup(x: Tensor, tile: _Tile) -> Tensor:
    """Return [B, K, group · rows, *] as [B, H, rows, *]."""
    return torch.unflatten(x, 2, (-1, tile.stop - tile.start)).flatten(1, 2)


def _scores(q_rows: Tensor, k: Tensor, scale: float, tile: _Tile) -> Tensor:
    """Return the scaled scores [B, K, group · rows, keys], −inf where a row may not look."""
    scores = (q_rows @ k[:, :, : tile.keys].mT).mul_(scale)
    if tile.causal:
        rows = tile.stop - tile.start
        future = torch.ones(rows, rows, dtype=torch.bool, device=scores.device).triu_(1)
        torch.unflatten(scores, 2, (-1, rows))[..., tile.start :].masked_fill_(future, -torch.inf)
    return scores
