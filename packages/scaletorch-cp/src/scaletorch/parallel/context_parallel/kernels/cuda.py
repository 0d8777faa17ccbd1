"""PyTorch's fused attention on CUDA devices, and the package flash-attn.

Flash takes windows; the others take FULL blocks and CAUSAL squares alone. On an H200 with torch
2.11 cuDNN took 0.6 times flash's time in bfloat16, at 8,192 and 32,768 causal positions of 32
query and 8 key/value heads of 128: it is asked first from compute capability 9.0 on. The package
flash-attn has not been run: it is called by its source from 2.7 on.

Gradients of the flash and the efficient operator repeat bit for bit only under
`torch.use_deterministic_algorithms(True)`; those of flash-attn always do.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda

from ..masks.blocks import Band
from .block import Gradients, Operands, expanded
from .fused import (
    HALF,
    Operator,
    asked,
    fused,
    is_causal,
    is_plain,
    no_seed,
    same_sizes,
    window_of,
)

aten = torch.ops.aten
_OF_CUDNN = (9, 0)  # the compute capability from which on it is the quickest


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
) -> tuple[Tensor, Tensor]:
    causal, window = _window(q, k, band)
    out, lse, *_ = aten._flash_attention_forward(
        *(x.transpose(1, 2) for x in (q, k, v)), None, None, q.shape[2], k.shape[2], 0.0,
        causal, False, scale=scale, **window,
    )  # fmt: skip
    return out.transpose(1, 2), lse


def _flash_backward(x: Operands, scale: float, band: Band) -> Gradients:
    causal, window = _window(x.q, x.k, band)
    state = torch.zeros(2, dtype=torch.uint64, device=x.q.device)
    dq, dk, dv = aten._flash_attention_backward(
        *(each.transpose(1, 2) for each in x[:-1]), x.lse, None, None, x.q.shape[2], x.k.shape[2],
        0.0, causal, state, no_seed(x.q), scale=scale, **window,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _window(q: Tensor, k: Tensor, band: Band) -> tuple[bool, dict[str, int]]:
    """Return whether flash calls a band causal, and its window."""
    left, right = window_of(q, k, band) or (-1, -1)
    return (left, right) == (-1, 0), {"window_size_left": left, "window_size_right": right}


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal(q, k, band), False, scale=scale
    )
    return out, lse


def _cudnn_backward(x: Operands, scale: float, band: Band) -> Gradients:
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        *x[:-1], x.lse.unsqueeze(-1), no_seed(x.q), no_seed(x.q), None, None, None,
        x.q.shape[2], x.k.shape[2], 0.0, is_causal(x.q, x.k, band), scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, is_causal(q, k, band), scale=scale
    )
    return out, lse


def _efficient_backward(x: Operands, scale: float, band: Band) -> Gradients:
    # The operator's own lse is as long as the next multiple of 32, and +inf behind the last row.
    lse = F.pad(x.lse, (0, -x.lse.shape[2] % 32), value=torch.inf)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        x.grad_out, x.q, x.k, x.v, None, x.out, lse, no_seed(x.q), no_seed(x.q), 0.0,
        [True, True, True, False], is_causal(x.q, x.k, band), scale=scale,
    )  # fmt: skip
    return dq, dk, dv


@cache
def flash_attn_is_installed() -> bool:
    """Return whether flash-attn 2.7 or later can be imported."""
    return find_spec("flash_attn") is not None and hasattr(
        _flash_attn(), "_wrapped_flash_attn_forward"
    )


def _flash_attn() -> Any:
    return import_module("flash_attn.flash_attn_interface")


def _flash_attn_options(q: Tensor, k: Tensor, scale: float, band: Band) -> dict[str, Any]:
    causal, window = _window(q, k, band)
    options = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None, **window}
    return {"softmax_scale": scale, "causal": causal, **options}


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _flash_attn()._flash_attn_forward(
        *(x.transpose(1, 2) for x in (q, k, v)), return_softmax=False,
        **_flash_attn_options(q, k, scale, band),
    )  # fmt: skip
    return out.transpose(1, 2), lse


def _flash_attn_backward(x: Operands, scale: float, band: Band) -> Gradients:
    grad_out, q, k, v, out = (each.transpose(1, 2) for each in x[:-1])
    dq, dk, dv = (torch.empty_like(each) for each in (q, k, v))
    _flash_attn()._flash_attn_backward(
        grad_out, q, k, v, out, x.lse, dq, dk, dv, deterministic=True,
        **_flash_attn_options(x.q, x.k, scale, band),
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


FLASH = Operator(_flash_forward, _flash_backward, is_grouped=True)
CUDNN = Operator(_cudnn_forward, _cudnn_backward, is_grouped=True)
EFFICIENT = Operator(_efficient_forward, _efficient_backward)
FLASH_ATTN = Operator(_flash_attn_forward, _flash_attn_backward, is_grouped=True)


def _fits_flash_attn(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    return _fits_flash(q, k, v, band) and flash_attn_is_installed()


def _fits_flash(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    fits = _is_of_eights(q, k, v) and window_of(q, k, band) is not None
    return fits and cuda.can_use_flash_attention(asked(q, k, v, band))


def _fits_cudnn(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    fits = _is_of_eights(q, k, v) and is_plain(q, k, band)
    return fits and cuda.can_use_cudnn_attention(asked(q, k, v, band))


def _fits_cudnn_first(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    return _is_new(q.device) and _fits_cudnn(q, k, v, band)


@cache
def _is_new(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _OF_CUDNN


def _fits_efficient(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    if not (same_sizes(q, k, v) and is_plain(q, k, band)):
        return False
    k, v = (expanded(x[:, :1], q.shape[1]) for x in (k, v))
    return cuda.can_use_efficient_attention(asked(q, k, v, band))


def _is_of_eights(q: Tensor, k: Tensor, v: Tensor) -> bool:
    # PyTorch's own test lets other head dims pass, since its caller pads them.
    return same_sizes(q, k, v) and q.dtype in HALF and q.shape[-1] % 8 == 0


KERNELS = (
    fused("cudnn", CUDNN, _fits_cudnn_first),
    fused("flash-attn", FLASH_ATTN, _fits_flash_attn),
    fused("flash", FLASH, _fits_flash),
    fused("cudnn", CUDNN, _fits_cudnn),
    fused("efficient", EFFICIENT, _fits_efficient),
)
