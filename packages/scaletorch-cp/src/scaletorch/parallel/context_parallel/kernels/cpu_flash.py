"""PyTorch's fused attention on CPU, as a kernel for FULL blocks and CAUSAL squares.

Properties of the operator, and their treatment:

- It ends the process at length 0, and takes one head dim and dtype: `fits` refuses others.
- It assumes stride 1 in the last dim without a check: tensors with another stride are copied.
- It masks scores before it scales them, and −inf times 0 is NaN: the tile takes scales <= 0.
- In bfloat16 it rounds `out`, and sums dq over every 512 keys, and dk, dv over every 256 rows (64
  or 32 of a shorter block) and over a group's heads, in that precision.

bfloat16 is computed in bfloat16 if that is faster than float32: always forward, and backward in
large blocks; dk, dv of short blocks would lose 1.4 times as much as in one process. float16 is
computed in float32, which is never slower.

`out` is rounded in each block and once merged. That costs at most 1.18 times the error of one
process, but up to 1.4 if blocks have similar weights: `methods.call` passes those in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..masks import CAUSAL, Band
from . import tile
from .block import (
    DTYPES,
    Gradients,
    Operands,
    is_plain,
    same_sizes,
    statistics_dtype,
    sum_groups,
    with_unit_stride,
    without_empty_rows,
)

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# Rows, keys and head dim from which on the backward is faster in bfloat16.
LARGE = 768, 256, 64


def fits(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    """Return whether the operator can take these tensors and this band."""
    return same_sizes(q, k, v) and q.dtype in DTYPES and is_plain(q, k, band)


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
    """Attend `q` to one block of keys: see `forward` of the package."""
    if scale <= 0:
        return tile.forward(q, k, v, scale, band)
    kept = statistics_dtype(q.dtype)
    dtype = q.dtype if q.dtype == torch.bfloat16 else kept
    q, k, v = (with_unit_stride(x, dtype) for x in (q, k, v))
    out, lse = _forward(q, k, v, 0.0, band == CAUSAL, scale=scale)
    return out.to(kept), lse


def backward(x: Operands, scale: float, band: Band) -> Gradients:
    """Return one block's term of the gradients: see `backward` of the package."""
    if scale <= 0:
        return tile.backward(x, scale, band)
    kv_heads = x.k.shape[1]
    dtype = kept = statistics_dtype(x.q.dtype)
    if x.q.dtype == torch.bfloat16 and _is_large(x.q, x.k):
        dtype, x = x.q.dtype, x.expand_heads()
    grad_out, q, k, v, out = (with_unit_stride(each, dtype) for each in x[:-1])
    x = Operands(grad_out, q, k, v, out, without_empty_rows(x.lse))
    dq, dk, dv = _backward(*x, 0.0, band == CAUSAL, scale=scale)
    return dq.to(kept), sum_groups(dk, kv_heads), sum_groups(dv, kv_heads)


def _is_large(q: Tensor, k: Tensor) -> bool:
    sizes = q.shape[2], k.shape[2], q.shape[3]
    return all(size >= least for size, least in zip(sizes, LARGE, strict=True))
