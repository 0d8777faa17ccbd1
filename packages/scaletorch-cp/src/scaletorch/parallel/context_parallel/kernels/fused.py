"""PyTorch's fused attention of CUDA and vendors' devices, as kernels for one block of keys.

Written by the operators' schemas and meta kernels: NOT RUN on any device yet. All take FULL and
CAUSAL squares alone, and give `out` and gradients in the inputs' dtype: a block's are rounded
once before they are merged in float32. K and V are expanded to all heads here, not where they
are stored or sent, so that a group's gradients are summed in float32.

Gradients of the flash and the efficient operator repeat bit for bit only under
`torch.use_deterministic_algorithms(True)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks.bands import CAUSAL, FULL, Band
from .merge import statistics_dtype
from .operands import Gradients, Operands, expanded, readable, summed, without_unseeing_rows

aten = torch.ops.aten


class Operator(NamedTuple):
    """A fused operator, with as many key/value heads as query heads.

    Attributes:
        forward: (q, k, v, scale, causal) -> out, and lse in the operator's own layout, which
            begins with the [B, H, L] that count.
        backward: (operands with lse [B, H, L], scale, causal) -> dq, dk, dv.
    """

    forward: Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Operands, float, bool], Gradients]


def plain(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    """Tell whether the band is one that fused operators know, and the tensors are alike."""
    known = band == FULL or (band == CAUSAL and q.shape[2] == k.shape[2])
    alike = q.dtype == k.dtype == v.dtype and q.shape[-1] == k.shape[-1] == v.shape[-1]
    return known and alike and q.numel() > 0 and k.numel() > 0


def forward(
    operator: Operator, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
) -> tuple[Tensor, Tensor]:
    """Attend `q` to one block of keys; as `tile.forward`."""
    q, k, v = (readable(expanded(x, q.shape[1]), q.dtype) for x in (q, k, v))
    out, lse = operator.forward(q, k, v, scale, band == CAUSAL)
    lse = lse[:, :, : q.shape[2]].reshape(q.shape[:3])
    return out.to(statistics_dtype(q.dtype)), lse


def backward(operator: Operator, x: Operands, scale: float, band: Band) -> Gradients:
    """Return one block's share of the gradients; as `tile.backward`."""
    heads, kv_heads, dtype = x.q.shape[1], x.k.shape[1], x.q.dtype
    q, k, v = (readable(expanded(each, heads), dtype) for each in (x.q, x.k, x.v))
    grad_out, out = (each.to(dtype).contiguous() for each in (x.grad_out, x.out))
    lse = without_unseeing_rows(x.lse).contiguous()
    whole = Operands(grad_out, q, k, v, out, lse)
    dq, dk, dv = operator.backward(whole, scale, band == CAUSAL)
    return dq.to(statistics_dtype(dtype)), summed(dk, kv_heads), summed(dv, kv_heads)


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, lse


def _flash_backward(x: Operands, scale: float, causal: bool) -> Gradients:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        *x, None, None, x.q.shape[2], x.k.shape[2], 0.0, causal,
        torch.zeros(2, dtype=torch.uint64, device=x.q.device), _no_seed(x.q), scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return out, lse


def _efficient_backward(x: Operands, scale: float, causal: bool) -> Gradients:
    # The operator's own lse is as long as the next multiple of 32, and +inf behind the last row.
    lse = F.pad(x.lse, (0, -x.lse.shape[2] % 32), value=torch.inf)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        x.grad_out, x.q, x.k, x.v, None, x.out, lse, _no_seed(x.q), _no_seed(x.q), 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse


def _cudnn_backward(x: Operands, scale: float, causal: bool) -> Gradients:
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        *x[:-1], x.lse.unsqueeze(-1), _no_seed(x.q), _no_seed(x.q), None, None, None,
        x.q.shape[2], x.k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _overrideable_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_fused_attention_overrideable(
        q, k, v, None, 0.0, causal, False, scale=scale
    )
    return out, lse


def _overrideable_backward(x: Operands, scale: float, causal: bool) -> Gradients:
    dq, dk, dv, _ = aten._scaled_dot_product_fused_attention_overrideable_backward(
        x.grad_out, x.q, x.k, x.v, None, [True, True, True, False], x.out, x.lse, None, None,
        x.q.shape[2], x.k.shape[2], 0.0, causal, _no_seed(x.q), _no_seed(x.q), scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _no_seed(q: Tensor) -> Tensor:
    """Return a seed or offset of dropout, which is asked for and not read."""
    return torch.zeros((), dtype=torch.int64, device=q.device)


FLASH = Operator(_flash_forward, _flash_backward)
EFFICIENT = Operator(_efficient_forward, _efficient_backward)
CUDNN = Operator(_cudnn_forward, _cudnn_backward)
OVERRIDEABLE = Operator(_overrideable_forward, _overrideable_backward)
