"""Which kernel computes a block: a table from device types to kernels, and a test for each.

The first kernel of the device that fits is taken, and the tile where none does. Any kernel can
run the backward of blocks whose forward another one ran, since all share one form of `out` and
`lse`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda

from ..masks.bands import CAUSAL, Band
from . import cpu_flash, flash_attn, fused, tile
from .operands import Gradients, Operands

Fits = Callable[[Tensor, Tensor, Tensor, Band], bool]
Forward = Callable[[Tensor, Tensor, Tensor, float, Band], tuple[Tensor, Tensor]]
Backward = Callable[[Operands, float, Band], Gradients]
HALF = (torch.float16, torch.bfloat16)
OVERRIDEABLE = "aten::_scaled_dot_product_fused_attention_overrideable"


class Kernel(NamedTuple):
    """How one block is computed, in the way that `tile.forward` and `tile.backward` say.

    Attributes:
        name: What it is called.
        fits: Tells of q, k, v and a band whether the kernel can compute them.
        forward: (q, k, v, scale, band) -> out, lse.
        backward: (operands, scale, band) -> dq, dk, dv.
    """

    name: str
    fits: Fits
    forward: Forward
    backward: Backward


def _fused(name: str, operator: fused.Operator, fits: Fits) -> Kernel:
    forward, backward = partial(fused.forward, operator), partial(fused.backward, operator)
    return Kernel(name, fits, forward, backward)


def _fits_flash_attn(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    return _fits_flash(q, k, v, band) and flash_attn.is_installed()


def _fits_flash(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    # PyTorch's own test lets other head dims pass, since its caller pads them.
    fits = fused.plain(q, k, v, band) and q.dtype in HALF and q.shape[-1] % 8 == 0
    return fits and cuda.can_use_flash_attention(_asked(q, k, v, band))


def _fits_cudnn(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    fits = fused.plain(q, k, v, band) and q.dtype in HALF and q.shape[-1] % 8 == 0
    return fits and cuda.can_use_cudnn_attention(_asked(q, k, v, band))


def _fits_efficient(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    return fused.plain(q, k, v, band) and cuda.can_use_efficient_attention(_asked(q, k, v, band))


def _fits_overrideable(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    """Tell whether the vendor has the operator, forward and backward; PyTorch's own raises."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return fused.plain(q, k, v, band) and all(
        has(name, "PrivateUse1") for name in (OVERRIDEABLE, f"{OVERRIDEABLE}_backward")
    )


def _asked(q: Tensor, k: Tensor, v: Tensor, band: Band) -> cuda.SDPAParams:
    k, v = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return cuda.SDPAParams(q, k, v, None, 0.0, band == CAUSAL, False)


TILE = Kernel("tile", lambda *_: True, tile.forward, tile.backward)
CPU_FLASH = Kernel("cpu flash", cpu_flash.fits, cpu_flash.forward, cpu_flash.backward)
CUDA = (
    _fused("flash-attn", flash_attn.FLASH_ATTN, _fits_flash_attn),
    _fused("flash", fused.FLASH, _fits_flash),
    _fused("cudnn", fused.CUDNN, _fits_cudnn),
    _fused("efficient", fused.EFFICIENT, _fits_efficient),
)
VENDOR = (_fused("overrideable", fused.OVERRIDEABLE, _fits_overrideable),)

# Device type -> kernels, best first; the tile stands behind all of them.
KERNELS: dict[str, tuple[Kernel, ...]] = {
    "cpu": (CPU_FLASH,),
    "cuda": CUDA,
    "privateuseone": VENDOR,
    "npu": VENDOR,
    "mlu": VENDOR,
    "musa": VENDOR,
}


def kernel_for(q: Tensor, k: Tensor, v: Tensor, band: Band) -> Kernel:
    """Return the kernel for a block: the device's first that fits, or the tile."""
    kernels = KERNELS.get(q.device.type, ())
    return next((kernel for kernel in kernels if kernel.fits(q, k, v, band)), TILE)


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
    """Attend `q` to one block of keys, by the kernel for it.

    Args:
        q: Queries [B, H, L, D].
        k: Keys [B, K, S, D]; K divides H.
        v: Values [B, K, S, D].
        scale: Factor of the scores.
        band: Row i sees key j where lower <= j - i <= upper.

    Returns:
        out [B, H, L, D] and lse [B, H, L], the natural logarithm of the sum of exponentials, in
        float32 (float64 for float64). Rows that see nothing have out 0 and lse −inf.
    """
    return kernel_for(q, k, v, band).forward(q, k, v, scale, band)


def backward(x: Operands, scale: float, band: Band) -> Gradients:
    """Return one block's share of the gradients of attention over several, by the kernel for it.

    With `out` and `lse` of the *merged* result, the sum of all blocks' shares is exact.

    Args:
        x: The block's rows and keys.
        scale: Factor of the scores.
        band: As in `forward`.

    Returns:
        dq, dk, dv in the shapes of q, k, v, in float32 (float64 for float64).
    """
    return kernel_for(x.q, x.k, x.v, band).backward(x, scale, band)
