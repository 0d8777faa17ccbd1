"""Operations that are one kernel on GPUs but several on the CPU, which keep more for backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def kernels_of(device: str) -> AbstractContextManager[Any]:
    """Run hollow tensors, which are on the CPU, by the kernels of "cpu" or "cuda"."""
    return _OfCuda() if device == "cuda" else nullcontext()


class _OfCuda(TorchFunctionMode):
    """Call CUDA's fused operator where torch would run several for CPU tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the fused replacement of a torch function, if there is one."""
        return _FUSED.get(func, func)(*args, **(kwargs or {}))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attend by flash attention (cuDNN's operator keeps the same), or by torch's fallback.

    Masks that are not learned go to cuDNN, float32 to the memory-efficient operator, the rest to
    plain matmuls.
    """
    half = query.dtype in _HALF and query.shape[-1] == value.shape[-1]
    learned = attn_mask is not None and attn_mask.requires_grad
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    mask = None if attn_mask is None else _added(attn_mask, query)
    options: dict[str, Any] = {"scale": scale}
    call: Any = aten._scaled_dot_product_efficient_attention
    more: tuple[Any, ...] = (mask, True, dropout_p, is_causal)
    if half and mask is None and query.ndim == 4:
        call, more = aten._scaled_dot_product_flash_attention, (dropout_p, is_causal, False)
    elif half and not learned and query.ndim == 4:
        call, more = aten._scaled_dot_product_cudnn_attention, (*more, False)
    elif grouped or query.ndim != 4 or query.dtype == torch.float64:
        call, more = aten._scaled_dot_product_attention_math, (mask, dropout_p, is_causal)
        options["enable_gqa"] = grouped
    out: Tensor = call(query, key, value, *more, **options)[0]
    return out


def _added(mask: Tensor, query: Tensor) -> Tensor:
    """Return a mask in the additive form."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Normalize by layer norm, as one kernel; torch decomposes its own before a mode sees it."""
    if weight is not None and weight.dtype != input.dtype:
        return F.rms_norm(input, normalized_shape, weight, eps)  # CUDA runs several kernels as well
    return F.layer_norm(input, normalized_shape, weight, None, 1e-6 if eps is None else eps)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drop in one kernel that keeps a mask of bytes."""
    if not training or p == 0 or inplace:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


_FUSED: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.dropout: _dropout,
}
