"""PyTorch's fused attention on CPU, as a kernel for one block of keys.

What the operator does, and what is done about it:

- It ends the process at length 0, and takes one head dim and dtype: `fits` says no to others.
- It reads another stride than 1 in the last dim as if it were 1: such tensors are copied.
- It gives a row that sees nothing lse 0: the pieces of a band hold no such row.
- `is_causal` is aligned to the top left, as CAUSAL is. Other bands go to it in strips of rows,
  with the keys that these see, and a mask where some row does not see all of those.
- In half precision it rounds `out`, and it sums dq over every 512 keys, and dk, dv over every 256
  rows (64 or 32 of a shorter block) and over a group's heads, in that precision. One process
  rounds `out` once; merged from blocks that were each rounded, it lost up to 1.37 times as much,
  and dk, dv of short blocks 1.4 times. So half precision is computed in float32, and `out` loses
  no more than in one process. The exception is the backward of large blocks in bfloat16, which
  is faster so: float32 sums over blocks replace the operator's own, and dq, dk, dv lost at most
  1.03 times as much as in one process (256 to 4096 positions in 1 to 8 blocks).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..bands import CAUSAL, FULL, Band
from .merge import statistics_dtype
from .operands import expanded, readable, summed, without_unseeing_rows
from .strips import Strip, hide_, sees_all, strips

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Rows of a strip: 64 to 256 took equally long for windows of 128 to 1024.
STRIP_ROWS = 128

# Rows and keys from which on bfloat16 is faster than float32.
LARGE = 768


def fits(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    """Tell whether the operator can be given these tensors; it can do any band."""
    same = q.dtype == k.dtype == v.dtype and q.shape[-1] == k.shape[-1] == v.shape[-1]
    return same and q.dtype in DTYPES and q.numel() > 0 and k.numel() > 0


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
    """Attend `q` to one block of keys; as `tile.forward`."""
    dtype = statistics_dtype(q.dtype)
    q, k, v = (readable(x, dtype) for x in (q, k, v))
    if _is_one_call(q, k, band):
        out, lse = _forward(q, k, v, 0.0, band == CAUSAL, scale=scale)
        return out, lse
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
    for rows, keys, mask in _strips(q, k, band):
        part = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        piece = _forward(*part, 0.0, False, attn_mask=mask, scale=scale)
        out[:, :, rows], lse[:, :, rows] = piece
    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    band: Band,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one block's share of the gradients; as `tile.backward`."""
    kv_heads, one_call = k.shape[1], _is_one_call(q, k, band)
    dtype = statistics_dtype(q.dtype)
    if one_call and q.dtype == torch.bfloat16 and min(q.shape[2], k.shape[2]) >= LARGE:
        dtype, k, v = q.dtype, expanded(k, q.shape[1]), expanded(v, q.shape[1])
    grad_out, q, k, v, out = (readable(x, dtype) for x in (grad_out, q, k, v, out))
    lse = without_unseeing_rows(lse)
    if not one_call:
        return _backward_in_strips(grad_out, q, k, v, out, lse, scale, band)
    dq, dk, dv = _backward(grad_out, q, k, v, out, lse, 0.0, band == CAUSAL, scale=scale)
    return dq.to(lse.dtype), summed(dk, kv_heads), summed(dv, kv_heads)


def _backward_in_strips(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    band: Band,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for rows, keys, mask in _strips(q, k, band):
        grad, queries, merged = (x[:, :, rows] for x in (grad_out, q, out))
        part = grad, queries, k[:, :, keys], v[:, :, keys], merged, lse[:, :, rows]
        shares = _backward(*part, 0.0, False, attn_mask=mask, scale=scale)
        dq[:, :, rows] = shares[0]
        dk[:, :, keys] += shares[1]
        dv[:, :, keys] += shares[2]
    return dq, dk, dv


def _is_one_call(q: Tensor, k: Tensor, band: Band) -> bool:
    """Tell whether the operator takes the block as it is."""
    return band == FULL or (band == CAUSAL and q.shape[2] == k.shape[2])


def _strips(q: Tensor, k: Tensor, band: Band) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield the rows, keys and mask of a band's strips."""
    for strip in strips(band, q.shape[2], k.shape[2], STRIP_ROWS):
        rows, keys = (slice(part.start, part.stop) for part in strip)
        yield rows, keys, None if sees_all(band, strip) else _mask(q, band, strip)


def _mask(q: Tensor, band: Band, strip: Strip) -> Tensor:
    return hide_(q.new_zeros(len(strip.rows), len(strip.keys)), band, strip)
