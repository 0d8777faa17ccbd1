"""Kernels for attention over one block of keys: a table from device types to kernels.

The first kernel of the device that fits is used, and the tile if none does. Any kernel can run the
backward of a block whose forward another one ran, since all share one form of `out` and `lse`.
"""

from __future__ import annotations

from torch import Tensor

from ..masks import Band
from . import cpu_flash, cuda, flex, tile
from .block import Gradients, Kernel, Operands

TILE = Kernel("tile", lambda *_: True, tile.forward, tile.backward, caps=True)
FLEX = Kernel("flex", flex.fits, flex.forward, flex.backward, caps=True)
CPU_FLASH = Kernel("cpu flash", cpu_flash.fits, cpu_flash.forward, cpu_flash.backward)
# Device type -> kernels, best first; the tile is the last resort of all.
KERNELS: dict[str, tuple[Kernel, ...]] = {
    "cpu": (CPU_FLASH,),
    "cuda": (*cuda.KERNELS, FLEX),
    "xpu": (FLEX,),
}


def kernel_for(q: Tensor, k: Tensor, v: Tensor, band: Band, cap: float | None = None) -> Kernel:
    """Return the kernel for a block: the device's first that fits, or the tile."""
    kernels = (each for each in KERNELS.get(q.device.type, ()) if each.caps or cap is None)
    return next((kernel for kernel in kernels if kernel.fits(q, k, v, band)), TILE)


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend `q` to one block of keys.

    Args:
        q: Queries [B, H, L, D].
        k: Keys [B, K, S, D]; K divides H.
        v: Values [B, K, S, Dv]; only flex_attention and the tile take another Dv than D.
        scale: Factor of the scores.
        band: Row i sees key j if lower <= j - i <= upper.
        cap: Scores s become cap · tanh(s / cap) before the softmax; None leaves them.

    Returns:
        out [B, H, L, Dv] and lse [B, H, L], the natural logarithm of the sum of exponentials, in
        float32 (float64 for float64), except that fused operators of devices return out in q's
        dtype. Rows that see nothing have out 0 and lse −inf.
    """
    caps = () if cap is None else (cap,)
    return kernel_for(q, k, v, band, *caps).forward(q, k, v, scale, band, *caps)


def backward(x: Operands, scale: float, band: Band, cap: float | None = None) -> Gradients:
    """Return one block's term of the gradients of attention over several blocks.

    With `out` and `lse` of the *merged* result, the sum of all blocks' terms is exact.

    Returns:
        dq, dk, dv in the shapes of q, k, v, in float32 (float64 for float64), or as `forward`.
    """
    caps = () if cap is None else (cap,)
    return kernel_for(x.q, x.k, x.v, band, *caps).backward(x, scale, band, *caps)
