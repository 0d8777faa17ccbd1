"""Kernels that NO DEVICE HERE HAS RUN: PyTorch's fused attention of CUDA and vendors, flash-attn.

Written by the operators' schemas, their meta kernels and flash-attn's source from 2.7 on. All that
is checked of them here are shapes, dtypes and arguments. `test_kernels_of_cuda`, in
`tests/test_cp_kernels.py`, compares their numbers on a machine with such a device (`pytest -m
gpu`). A kernel that has passed it moves out of this file.

All take FULL and CAUSAL squares alone, and give `out` and gradients in the inputs' dtype: a
block's are rounded once before they are merged in float32. K and V are expanded to all heads
here, not before they are stored or sent, so that a group's gradients are summed in float32.

Gradients of the flash and the efficient operator repeat bit for bit only under
`torch.use_deterministic_algorithms(True)`; those of flash-attn always do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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
    statistics_dtype,
    summed,
    without_unseeing_rows,
)

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
OVERRIDEABLE = "aten::_scaled_dot_product_fused_attention_overrideable"

OperatorForward = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]


class Operator(NamedTuple):
    """A fused operator, with as many key/value heads as query heads.

    Attributes:
        forward: (q, k, v, scale, causal) -> out, and lse in the operator's own layout, which
            begins with the [B, H, L] that count.
        backward: (operands with lse [B, H, L], scale, causal) -> dq, dk, dv.
    """

    forward: OperatorForward
    backward: Callable[[Operands, float, bool], Gradients]


def plain(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    """Return whether fused operators know the band, and the tensors have one dtype and head dim."""
    known = band == FULL or (band == CAUSAL and q.shape[2] == k.shape[2])
    same = q.dtype == k.dtype == v.dtype and q.shape[-1] == k.shape[-1] == v.shape[-1]
    return known and same and q.numel() > 0 and k.numel() > 0


def forward(
    operator: Operator, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
) -> tuple[Tensor, Tensor]:
    """Attend `q` to one block of keys; as `table.forward`."""
    q, k, v = (readable(expanded(x, q.shape[1]), q.dtype) for x in (q, k, v))
    out, lse = operator.forward(q, k, v, scale, band == CAUSAL)
    lse = lse[:, :, : q.shape[2]].reshape(q.shape[:3])
    return out.to(statistics_dtype(q.dtype)), lse


def backward(operator: Operator, x: Operands, scale: float, band: Band) -> Gradients:
    """Return one block's share of the gradients; as `table.backward`."""
    kv_heads, dtype, x = x.k.shape[1], x.q.dtype, x.expanded()
    q, k, v = (readable(each, dtype) for each in (x.q, x.k, x.v))
    grad_out, out = (each.to(dtype).contiguous() for each in (x.grad_out, x.out))
    lse = without_unseeing_rows(x.lse).contiguous()
    whole = Operands(grad_out, q, k, v, out, lse)
    dq, dk, dv = operator.backward(whole, scale, band == CAUSAL)
    return dq.to(statistics_dtype(dtype)), summed(dk, kv_heads), summed(dv, kv_heads)


def _forward(name: str, *before: Any, after: tuple[Any, ...] = ()) -> OperatorForward:
    """Return a forward by an operator of PyTorch.

    Args:
        name: The operator's.
        before: Its arguments between v and whether attention is causal.
        after: Its arguments behind that, before the scale.
    """

    def forward(
        q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = getattr(aten, name)(q, k, v, *before, causal, *after, scale=scale)
        return out, lse

    return forward


def _flash_backward(x: Operands, scale: float, causal: bool) -> Gradients:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        *x, None, None, x.q.shape[2], x.k.shape[2], 0.0, causal,
        torch.zeros(2, dtype=torch.uint64, device=x.q.device), _no_seed(x.q), scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _efficient_backward(x: Operands, scale: float, causal: bool) -> Gradients:
    # The operator's own lse is as long as the next multiple of 32, and +inf behind the last row.
    lse = F.pad(x.lse, (0, -x.lse.shape[2] % 32), value=torch.inf)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        x.grad_out, x.q, x.k, x.v, None, x.out, lse, _no_seed(x.q), _no_seed(x.q), 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _cudnn_backward(x: Operands, scale: float, causal: bool) -> Gradients:
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        *x[:-1], x.lse.unsqueeze(-1), _no_seed(x.q), _no_seed(x.q), None, None, None,
        x.q.shape[2], x.k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _overrideable_backward(x: Operands, scale: float, causal: bool) -> Gradients:
    dq, dk, dv, _ = aten._scaled_dot_product_fused_attention_overrideable_backward(
        x.grad_out, x.q, x.k, x.v, None, [True, True, True, False], x.out, x.lse, None, None,
        x.q.shape[2], x.k.shape[2], 0.0, causal, _no_seed(x.q), _no_seed(x.q), scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _no_seed(q: Tensor) -> Tensor:
    """Return a seed or offset of dropout, which is asked for and not read."""
    return torch.zeros((), dtype=torch.int64, device=q.device)


FLASH = Operator(
    _forward("_scaled_dot_product_flash_attention", 0.0, after=(False,)), _flash_backward
)
EFFICIENT = Operator(
    _forward("_scaled_dot_product_efficient_attention", None, True, 0.0), _efficient_backward
)
CUDNN = Operator(
    _forward("_scaled_dot_product_cudnn_attention", None, True, 0.0, after=(False,)),
    _cudnn_backward,
)
VENDORS = Operator(
    _forward("_scaled_dot_product_fused_attention_overrideable", None, 0.0, after=(False,)),
    _overrideable_backward,
)


NO_WINDOW: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}


@cache
def flash_attn_is_installed() -> bool:
    """Return whether flash-attn 2.7 or later can be imported."""
    return find_spec("flash_attn") is not None and hasattr(
        _flash_attn(), "_wrapped_flash_attn_forward"
    )


def _flash_attn() -> Any:
    return import_module("flash_attn.flash_attn_interface")


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = _flash_attn()._flash_attn_forward(
        q, k, v, softmax_scale=scale, causal=causal, return_softmax=False, **NO_WINDOW
    )
    return out.transpose(1, 2), lse


def _flash_attn_backward(x: Operands, scale: float, causal: bool) -> Gradients:
    grad_out, q, k, v, out = (each.transpose(1, 2) for each in x[:-1])
    dq, dk, dv = (torch.empty_like(each) for each in (q, k, v))
    _flash_attn()._flash_attn_backward(
        grad_out, q, k, v, out, x.lse, dq, dk, dv,
        softmax_scale=scale, causal=causal, deterministic=True, **NO_WINDOW,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


FLASH_ATTN = Operator(_flash_attn_forward, _flash_attn_backward)


def _fused(name: str, operator: Operator, fits: Fits) -> Kernel:
    return Kernel(name, fits, partial(forward, operator), partial(backward, operator))


def _fits_flash_attn(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    return _fits_flash(q, k, v, band) and flash_attn_is_installed()


def _fits_flash(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    # PyTorch's own test lets other head dims pass, since its caller pads them.
    fits = plain(q, k, v, band) and q.dtype in HALF and q.shape[-1] % 8 == 0
    return fits and cuda.can_use_flash_attention(_asked(q, k, v, band))


def _fits_cudnn(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    fits = plain(q, k, v, band) and q.dtype in HALF and q.shape[-1] % 8 == 0
    return fits and cuda.can_use_cudnn_attention(_asked(q, k, v, band))


def _fits_efficient(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    return plain(q, k, v, band) and cuda.can_use_efficient_attention(_asked(q, k, v, band))


def _fits_overrideable(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    """Return whether the vendor has the operator, forward and backward; PyTorch's own raises."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return plain(q, k, v, band) and all(
        has(name, "PrivateUse1") for name in (OVERRIDEABLE, f"{OVERRIDEABLE}_backward")
    )


def _asked(q: Tensor, k: Tensor, v: Tensor, band: Band) -> cuda.SDPAParams:
    k, v = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return cuda.SDPAParams(q, k, v, None, 0.0, band == CAUSAL, False)


CUDA = (
    _fused("flash-attn", FLASH_ATTN, _fits_flash_attn),
    _fused("flash", FLASH, _fits_flash),
    _fused("cudnn", CUDNN, _fits_cudnn),
    _fused("efficient", EFFICIENT, _fits_efficient),
)
VENDOR = (_fused("overrideable", VENDORS, _fits_overrideable),)
