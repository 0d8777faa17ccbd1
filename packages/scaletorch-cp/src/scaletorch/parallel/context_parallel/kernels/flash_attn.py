"""The flash-attn package, where it is installed, as an operator of `fused`.

Written by the package's source from 2.7 on: NOT RUN yet. It repeats bit for bit.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .fused import Operator
from .operands import Gradients, Operands

NO_WINDOW: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}


@cache
def is_installed() -> bool:
    """Tell whether flash-attn 2.7 or later can be imported."""
    return find_spec("flash_attn") is not None and hasattr(
        _interface(), "_wrapped_flash_attn_forward"
    )


def _interface() -> Any:
    return import_module("flash_attn.flash_attn_interface")


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = _interface()._flash_attn_forward(
        q, k, v, softmax_scale=scale, causal=causal, return_softmax=False, **NO_WINDOW
    )
    return out.transpose(1, 2), lse


def _backward(x: Operands, scale: float, causal: bool) -> Gradients:
    grad_out, q, k, v, out = (each.transpose(1, 2) for each in x[:-1])
    dq, dk, dv = (torch.empty_like(each) for each in (q, k, v))
    _interface()._flash_attn_backward(
        grad_out, q, k, v, out, x.lse, dq, dk, dv,
        softmax_scale=scale, causal=causal, deterministic=True, **NO_WINDOW,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


FLASH_ATTN = Operator(_forward, _backward)
