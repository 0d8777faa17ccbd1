"""Vendors' fused attention, by the operator that PyTorch has for them. NO DEVICE HERE HAS RUN IT.

Written by the operator's schema: all that is checked of it are shapes, dtypes and arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..masks.blocks import Band
from .block import Gradients, Operands
from .fused import Operator, fused, is_causal, is_plain, no_seed, same_sizes

aten = torch.ops.aten
NAME = "aten::_scaled_dot_product_fused_attention_overrideable"


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_fused_attention_overrideable(
        q, k, v, None, 0.0, is_causal(q, k, band), False, scale=scale
    )
    return out, lse


def _backward(x: Operands, scale: float, band: Band) -> Gradients:
    dq, dk, dv, _ = aten._scaled_dot_product_fused_attention_overrideable_backward(
        x.grad_out, x.q, x.k, x.v, None, [True, True, True, False], x.out, x.lse, None, None,
        x.q.shape[2], x.k.shape[2], 0.0, is_causal(x.q, x.k, band), no_seed(x.q), no_seed(x.q),
        scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _fits(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    """Return whether the vendor has the operator, forward and backward; PyTorch's own raises."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    fits = same_sizes(q, k, v) and is_plain(q, k, band)
    return fits and all(has(name, "PrivateUse1") for name in (NAME, f"{NAME}_backward"))


OVERRIDEABLE = Operator(_forward, _backward)
KERNELS = (fused("overrideable", OVERRIDEABLE, _fits),)
