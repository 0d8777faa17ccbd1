"""What fused kernels ask of their operands: strides, expanded heads, finite weights."""

from __future__ import annotations

import torch
from torch import Tensor

from .merge import statistics_dtype


def readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in this dtype and with stride 1 in the last dim, which kernels take for granted."""
    x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def expanded(x: Tensor, heads: int) -> Tensor:
    """Return keys or values [B, K, S, D] once for every query head, [B, H, S, D]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def summed(grad: Tensor, kv_heads: int) -> Tensor:
    """Return gradients [B, H, S, D] of expanded heads as [B, K, S, D], in `statistics_dtype`."""
    dtype = statistics_dtype(grad.dtype)
    if grad.shape[1] == kv_heads:
        return grad.to(dtype)
    return torch.unflatten(grad, 1, (kv_heads, -1)).sum(2, dtype=dtype)


def without_unseeing_rows(lse: Tensor) -> Tensor:
    """Return lse with +inf for −inf: weights exp(score − lse) of such rows are 0, and not NaN."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)
