"""PyTorch's fused attention on CPU, as a kernel for FULL blocks and CAUSAL squares.

How the operator behaves, and how this file deals with it:

- It ends the process at length 0, and takes one head dim and dtype: `fits` says no to others.
- It reads another stride than 1 in the last dim as if it were 1: such tensors are copied.
- It hides scores before it scales them, and −inf times 0 is NaN: the tile takes a scale up to 0.
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

import torch
from torch import Tensor

from ..masks.blocks import CAUSAL, Band
from . import tile
from .block import (
    Gradients,
    Operands,
    is_plain,
    readable,
    same_sizes,
    statistics_dtype,
    summed,
    without_unseeing_rows,
)

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Rows, keys and head dim from which on the backward is faster in bfloat16.
LARGE = 768, 256, 64


def fits(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    """Return whether the operator can be given these tensors and this band."""
    return same_sizes(q, k, v) and q.dtype in DTYPES and is_plain(q, k, band)


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
    """Attend `q` to one block of keys; as `table.forward`."""
    if scale <= 0:
        return tile.forward(q, k, v, scale, band)
    kept = statistics_dtype(q.dtype)
    dtype = q.dtype if q.dtype == torch.bfloat16 else kept
    q, k, v = (readable(x, dtype) for x in (q, k, v))
    out, lse = _forward(q, k, v, 0.0, band == CAUSAL, scale=scale)
    return out.to(kept), lse


def backward(x: Operands, scale: float, band: Band) -> Gradients:
    """Return one block's share of the gradients; as `table.backward`."""
    if scale <= 0:
        return tile.backward(x, scale, band)
    kv_heads = x.k.shape[1]
    dtype = kept = statistics_dtype(x.q.dtype)
    if x.q.dtype == torch.bfloat16 and _is_large(x.q, x.k):
        dtype, x = x.q.dtype, x.expanded()
    grad_out, q, k, v, out = (readable(each, dtype) for each in x[:-1])
    x = Operands(grad_out, q, k, v, out, without_unseeing_rows(x.lse))
    dq, dk, dv = _backward(*x, 0.0, band == CAUSAL, scale=scale)
    return dq.to(kept), summed(dk, kv_heads), summed(dv, kv_heads)


def _is_large(q: Tensor, k: Tensor) -> bool:
    sizes = q.shape[2], k.shape[2], q.shape[3]
    return all(size >= least for size, least in zip(sizes, LARGE, strict=True))
