"""PyTorch's fused attention operators on CUDA devices, as kernels for one block of keys.

Flash takes windows; the others take FULL blocks and CAUSAL squares only. On an H200 with torch
2.11 cuDNN took 0.6 times flash's time in bfloat16, at 8,192 and 32,768 causal positions of 32
query and 8 key/value heads of 128: it is used from compute capability 9.0 on.

They return `out` and gradients in the inputs' dtype; those of several blocks are merged, or added
up, in float32. For an operator without grouped heads K and V are expanded just before the call, not
before they are stored or sent, so that a group's gradients are summed in float32.

Gradients of the flash and the efficient operator repeat bit for bit only under
`torch.use_deterministic_algorithms(True)`.
"""

from __future__ import annotations

from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda

from ..masks import Band
from .block import (
    Backward,
    Fits,
    Forward,
    Gradients,
    Kernel,
    Operands,
    expand_heads,
    is_causal,
    is_plain,
    same_sizes,
    sum_groups,
    with_unit_stride,
    without_empty_rows,
)

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def fused(name: str, fits: Fits, forward: Forward, backward: Backward) -> Kernel:
    """Return the kernel of an operator, whose lse has a shape that begins with [B, H, L]."""
    return Kernel(name, fits, partial(_forward, forward), partial(_backward, backward))


def _forward(
    operator: Forward, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
) -> tuple[Tensor, Tensor]:
    q, k, v = (with_unit_stride(x, q.dtype) for x in (q, k, v))
    out, lse = operator(q, k, v, scale, band)
    lse = lse[:, :, : q.shape[2]].reshape(q.shape[:3])
    return out, lse.masked_fill(lse == torch.inf, -torch.inf)  # rows that see nothing


def _backward(operator: Backward, x: Operands, scale: float, band: Band) -> Gradients:
    dtype = x.q.dtype
    q, k, v = (with_unit_stride(each, dtype) for each in (x.q, x.k, x.v))
    # Some operators assume the strides of [B, L, H, D] for both.
    in_order = (each.to(dtype).transpose(1, 2).contiguous() for each in (x.grad_out, x.out))
    grad_out, out = (each.transpose(1, 2) for each in in_order)
    lse = without_empty_rows(x.lse).contiguous()
    return operator(Operands(grad_out, q, k, v, out, lse), scale, band)


def sdpa_params(q: Tensor, k: Tensor, v: Tensor, band: Band) -> cuda.SDPAParams:
    """Return the arguments of PyTorch's checks that a kernel supports its inputs."""
    grouped = q.shape[1] != k.shape[1]
    return cuda.SDPAParams(q, k, v, None, 0.0, is_causal(q, k, band), grouped)


def empty_seed(q: Tensor) -> Tensor:
    """Return a dropout seed or offset: operators require it but do not use it."""
    return torch.zeros((), dtype=torch.int64, device=q.device)


def _has_dims_of_eights(q: Tensor, k: Tensor, v: Tensor) -> bool:
    # PyTorch's own test accepts other head dims, since its caller pads them.
    return same_sizes(q, k, v) and q.dtype in HALF and q.shape[-1] % 8 == 0


@cache
def _is_new(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return bool(torch.get_device_module(device).get_device_capability(device) >= (9, 0))


def _fits_cudnn(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    fits = _is_new(q.device) and _has_dims_of_eights(q, k, v) and is_plain(q, k, band)
    return fits and cuda.can_use_cudnn_attention(sdpa_params(q, k, v, band))


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal(q, k, band), False, scale=scale
    )
    return out, lse


def _cudnn_backward(x: Operands, scale: float, band: Band) -> Gradients:
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        *x[:-1], x.lse.unsqueeze(-1), empty_seed(x.q), empty_seed(x.q), None, None, None,
        x.q.shape[2], x.k.shape[2], 0.0, is_causal(x.q, x.k, band), scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def window_of(q: Tensor, k: Tensor, band: Band) -> tuple[int, int] | None:
    """Return the number of keys that a row sees to the left and to the right of its own.

    Flash aligns the last row with the last key. -1 means all keys. Return None if a row does not
    see its own key.
    """
    (lower, upper), shift = band, k.shape[2] - q.shape[2]
    left = -1 if lower is None else shift - lower
    right = -1 if upper is None else upper - shift
    within = (lower is None or left >= 0) and (upper is None or right >= 0)
    return (left, right) if within else None


def _fits_flash(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    fits = _has_dims_of_eights(q, k, v) and window_of(q, k, band) is not None
    return fits and cuda.can_use_flash_attention(sdpa_params(q, k, v, band))


def _window(q: Tensor, k: Tensor, band: Band) -> tuple[bool, dict[str, int]]:
    """Return whether flash calls a band causal, and its window arguments."""
    left, right = window_of(q, k, band) or (-1, -1)
    return (left, right) == (-1, 0), {"window_size_left": left, "window_size_right": right}


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
        0.0, causal, state, empty_seed(x.q), scale=scale, **window,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _fits_efficient(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    if not (same_sizes(q, k, v) and is_plain(q, k, band)):
        return False
    k, v = (expand_heads(x[:, :1], q.shape[1]) for x in (k, v))
    return cuda.can_use_efficient_attention(sdpa_params(q, k, v, band))


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
) -> tuple[Tensor, Tensor]:
    k, v = (expand_heads(x, q.shape[1]) for x in (k, v))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, is_causal(q, k, band), scale=scale
    )
    return out, lse


def _efficient_backward(x: Operands, scale: float, band: Band) -> Gradients:
    kv_heads, x = x.k.shape[1], x.expand_heads()
    # The operator's lse is padded to a multiple of 32 rows, with +inf.
    lse = F.pad(x.lse, (0, -x.lse.shape[2] % 32), value=torch.inf)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        x.grad_out, x.q, x.k, x.v, None, x.out, lse, empty_seed(x.q), empty_seed(x.q), 0.0,
        [True, True, True, False], is_causal(x.q, x.k, band), scale=scale,
    )  # fmt: skip
    grouped = kv_heads < x.q.shape[1]
    return dq, *(sum_groups(d, kv_heads) if grouped else d for d in (dk, dv))


CUDNN = fused("cudnn", _fits_cudnn, _cudnn_forward, _cudnn_backward)
FLASH = fused("flash", _fits_flash, _flash_forward, _flash_backward)
EFFICIENT = fused("efficient", _fits_efficient, _efficient_forward, _efficient_backward)
KERNELS = (CUDNN, FLASH, EFFICIENT)
