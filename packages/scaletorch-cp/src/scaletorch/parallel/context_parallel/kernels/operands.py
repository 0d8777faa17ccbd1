"""What backward is given, and what fused kernels ask of it: strides, heads, finite weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .merge import statistics_dtype

Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k, v


class Operands(NamedTuple):
    """What the backward of attention over some keys is given; PyTorch's operators have this order.

    Attributes:
        grad_out: Gradient of the merged output [B, H, L, Dv].
        q: Queries [B, H, L, D].
        k: Keys [B, K, S, D]; K divides H.
        v: Values [B, K, S, Dv].
        out: Merged output [B, H, L, Dv], in q's dtype or in `statistics_dtype`.
        lse: Merged log-sum-exp [B, H, L].
    """

    grad_out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def part(self, rows: slice, keys: slice) -> Operands:
        """Return those of some rows and keys."""
        grad_out, q, out, lse = (x[:, :, rows] for x in (self.grad_out, self.q, self.out, self.lse))
        return Operands(grad_out, q, self.k[:, :, keys], self.v[:, :, keys], out, lse)


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
