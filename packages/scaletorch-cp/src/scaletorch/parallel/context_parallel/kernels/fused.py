"""Fused attention operators of devices, as kernels for one block of keys.

They give `out` and gradients in the inputs' dtype: those of several blocks are merged, or added up,
in float32. An operator for as many key/value heads as query heads has K and V expanded here, not
before they are stored or sent, so that a group's gradients are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda

from ..masks.blocks import CAUSAL, FULL, Band
from .block import (
    Fits,
    Gradients,
    Kernel,
    Operands,
    expanded,
    readable,
    summed,
    without_unseeing_rows,
)

HALF = (torch.float16, torch.bfloat16)


class Operator(NamedTuple):
    """A fused operator.

    Attributes:
        forward: (q, k, v, scale, band) -> out, and lse in the operator's own layout, which begins
            with the [B, H, L] that count.
        backward: (operands with lse [B, H, L], scale, band) -> dq, dk, dv.
        is_grouped: Whether it takes fewer key/value heads than query heads.
    """

    forward: Callable[[Tensor, Tensor, Tensor, float, Band], tuple[Tensor, Tensor]]
    backward: Callable[[Operands, float, Band], Gradients]
    is_grouped: bool = False


def fused(name: str, operator: Operator, fits: Fits) -> Kernel:
    """Return the kernel of an operator."""
    return Kernel(name, fits, partial(_forward, operator), partial(_backward, operator))


def _forward(
    operator: Operator, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
) -> tuple[Tensor, Tensor]:
    if not operator.is_grouped:
        k, v = (expanded(x, q.shape[1]) for x in (k, v))
    q, k, v = (readable(x, q.dtype) for x in (q, k, v))
    out, lse = operator.forward(q, k, v, scale, band)
    lse = lse[:, :, : q.shape[2]].reshape(q.shape[:3])
    return out, lse.masked_fill(lse == torch.inf, -torch.inf)  # of rows that see nothing


def _backward(operator: Operator, x: Operands, scale: float, band: Band) -> Gradients:
    kv_heads, dtype = x.k.shape[1], x.q.dtype
    x = x if operator.is_grouped else x.expanded()
    q, k, v = (readable(each, dtype) for each in (x.q, x.k, x.v))
    # Operators read both by strides of their own, or take them for those of [B, L, H, D].
    grad_out, out = (by_position(each.to(dtype)) for each in (x.grad_out, x.out))
    lse = without_unseeing_rows(x.lse).contiguous()
    dq, dk, dv = operator.backward(Operands(grad_out, q, k, v, out, lse), scale, band)
    dk, dv = (d if d.shape[1] == kv_heads else summed(d, kv_heads) for d in (dk, dv))
    return dq, dk, dv


def by_position(x: Tensor) -> Tensor:
    """Return x [B, H, L, D] with its memory in the order [B, L, H, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def same_sizes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether tensors have one dtype and one head dim, and something in them."""
    same = q.dtype == k.dtype == v.dtype and q.shape[-1] == k.shape[-1] == v.shape[-1]
    return same and q.numel() > 0 and k.numel() > 0


def is_causal(q: Tensor, k: Tensor, band: Band) -> bool:
    """Return whether a band is CAUSAL on a square, which operators have a word for."""
    return band == CAUSAL and q.shape[2] == k.shape[2]


def is_plain(q: Tensor, k: Tensor, band: Band) -> bool:
    """Return whether a band is one that all operators know: FULL, or CAUSAL on a square."""
    return band == FULL or is_causal(q, k, band)


def window_of(q: Tensor, k: Tensor, band: Band) -> tuple[int, int] | None:
    """Return a band as flash counts it, from the last row and the last key on.

    Returns:
        How many keys a row sees to the left and to the right of its own, -1 for all of them; None
        if it does not see its own.
    """
    (lower, upper), shift = band, k.shape[2] - q.shape[2]
    left = -1 if lower is None else shift - lower
    right = -1 if upper is None else upper - shift
    within = (lower is None or left >= 0) and (upper is None or right >= 0)
    return (left, right) if within else None


def asked(q: Tensor, k: Tensor, v: Tensor, band: Band) -> cuda.SDPAParams:
    """Return what PyTorch's own tests of its kernels are given."""
    grouped = q.shape[1] != k.shape[1]
    return cuda.SDPAParams(q, k, v, None, 0.0, is_causal(q, k, band), grouped)


def no_seed(q: Tensor) -> Tensor:
    """Return a seed or offset of dropout, which is asked for and not read."""
    return torch.zeros((), dtype=torch.int64, device=q.device)
