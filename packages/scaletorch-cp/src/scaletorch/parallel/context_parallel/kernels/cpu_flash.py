"""PyTorch's fused attention on CPU, as a kernel for one block of keys.

How the operator behaves, and how this file deals with it:

- It ends the process at length 0, and takes one head dim and dtype: `fits` says no to others.
- It reads another stride than 1 in the last dim as if it were 1: such tensors are copied.
- It gives a row that sees nothing lse 0: the pieces of a band hold no such row.
- `is_causal` is aligned to the top left, as CAUSAL is. Other bands go to it in strips of rows,
  with the keys that these see, and a mask if some row does not see all of those.
- In bfloat16 it rounds `out`, and sums dq over every 512 keys, and dk, dv over every 256 rows (64
  or 32 of a shorter block) and over a group's heads, in that precision.

bfloat16 runs as it is if that is faster than float32: always forward, and backward in large
blocks, in which float32 sums over blocks replace the operator's own; dk, dv of short blocks would
lose 1.4 times as much as in one process. float16 is computed in float32: it is faster nowhere.

Its cost, against one process that runs `F.scaled_dot_product_attention` in bfloat16, for
causal zigzag on 2 to 8 ranks, 256 to 4096 positions, head dims 16 to 128: `out`, rounded in each
block and once merged, loses 1.06 to 1.18 times as much, with a mean of 1 or without; 1.24 at most
with scores twice as sharp (1.26 in blocks of 16 rows), and 1.32 four times. dq, dk, dv lose 1.1
times at most, and 1.28 with scores four times as sharp. A block that is the only one of its rows
has the bits of one process. If all blocks weigh the same `out` would lose 1.2 to 1.4 times:
`methods.call` gives such blocks in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..masks.blocks import CAUSAL, FULL, Band
from .block import Gradients, Operands, readable, statistics_dtype, summed, without_unseeing_rows
from .strips import Strip, hide_, sees_all, strips

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Rows of a strip: 64 to 256 took equally long for windows of 128 to 1024.
STRIP_ROWS = 128

# Rows, keys and head dim from which on the backward is faster in bfloat16.
LARGE = 768, 256, 64


def fits(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    """Return whether the operator can be given these tensors; it can do any band."""
    same = q.dtype == k.dtype == v.dtype and q.shape[-1] == k.shape[-1] == v.shape[-1]
    return same and q.dtype in DTYPES and q.numel() > 0 and k.numel() > 0


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
    """Attend `q` to one block of keys; as `table.forward`."""
    kept = statistics_dtype(q.dtype)
    dtype = q.dtype if q.dtype == torch.bfloat16 else kept
    q, k, v = (readable(x, dtype) for x in (q, k, v))
    if _is_one_call(q, k, scale, band):
        out, lse = _forward(q, k, v, 0.0, band == CAUSAL, scale=scale)
        return out.to(kept), lse
    out = torch.zeros_like(q, dtype=kept)
    lse = out.new_full(q.shape[:3], -torch.inf)
    for rows, keys, mask in _strips(q, k, band):
        part = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        piece = _forward(*part, 0.0, False, attn_mask=mask, scale=scale)
        out[:, :, rows], lse[:, :, rows] = piece
    return out, lse


def backward(x: Operands, scale: float, band: Band) -> Gradients:
    """Return one block's share of the gradients; as `table.backward`."""
    kv_heads, one_call = x.k.shape[1], _is_one_call(x.q, x.k, scale, band)
    dtype = kept = statistics_dtype(x.q.dtype)
    if one_call and x.q.dtype == torch.bfloat16 and _is_large(x.q, x.k):
        dtype, x = x.q.dtype, x.expanded()
    grad_out, q, k, v, out = (readable(each, dtype) for each in x[:-1])
    x = Operands(grad_out, q, k, v, out, without_unseeing_rows(x.lse))
    if not one_call:
        return _backward_in_strips(x, scale, band)
    dq, dk, dv = _backward(*x, 0.0, band == CAUSAL, scale=scale)
    return dq.to(kept), summed(dk, kv_heads), summed(dv, kv_heads)


def _backward_in_strips(x: Operands, scale: float, band: Band) -> Gradients:
    dq, dk, dv = (torch.zeros_like(each) for each in (x.q, x.k, x.v))
    for rows, keys, mask in _strips(x.q, x.k, band):
        shares = _backward(*x.part(rows, keys), 0.0, False, attn_mask=mask, scale=scale)
        dq[:, :, rows] = shares[0]
        dk[:, :, keys] += shares[1]
        dv[:, :, keys] += shares[2]
    return dq, dk, dv


def _is_one_call(q: Tensor, k: Tensor, scale: float, band: Band) -> bool:
    """Return whether the operator takes the block as it is."""
    # It hides scores before it scales them: −inf times 0 is NaN, and times −1 it is +inf.
    return band == FULL or (band == CAUSAL and q.shape[2] == k.shape[2] and scale > 0)


def _is_large(q: Tensor, k: Tensor) -> bool:
    sizes = q.shape[2], k.shape[2], q.shape[3]
    return all(size >= least for size, least in zip(sizes, LARGE, strict=True))


def _strips(q: Tensor, k: Tensor, band: Band) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield the rows, keys and mask of a band's strips."""
    for strip in strips(band, q.shape[2], k.shape[2], STRIP_ROWS):
        rows, keys = (slice(part.start, part.stop) for part in strip)
        yield rows, keys, None if sees_all(band, strip) else _mask(q, band, strip)


def _mask(q: Tensor, band: Band, strip: Strip) -> Tensor:
    return hide_(q.new_zeros(len(strip.rows), len(strip.keys)), band, strip)
