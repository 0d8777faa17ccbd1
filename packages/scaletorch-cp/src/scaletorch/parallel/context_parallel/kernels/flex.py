"""PyTorch's flex_attention, for inputs that fused operators refuse: caps, any band, head dims.

It takes capped scores, windows in float32, values with another head dim, and grouped heads without
expansion. IT HAS NOT BEEN RUN COMPILED ON A DEVICE: tests run the same code on CPU, uncompiled. If
it fails to compile, one warning says so and the tile computes the block.

It is compiled once for a process, with dynamic shapes. Bounds of a band, the scale and the cap are
tensors, and operands are contiguous, so that neither a ring's steps nor other lengths compile it
again: training needs two graphs, without gradients and with, and more for dims of 1.

Backward recomputes the block and differentiates it. With out and lse of the block, and O and LSE of
all blocks merged, the block has the weight w = exp(lse - LSE) in each row, so its grad out is
w · grad O, and its grad lse w · grad O · (out - O), summed over the head dim.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as shapes
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ..masks import Band
from . import tile
from .block import Gradients, Operands, statistics_dtype, without_empty_rows

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LEAST_HEAD_DIM = 16  # of Triton's matrix products
GRAPHS = 64  # for all head dims, dtypes and numbers of heads; torch's default limit is 8
BLOCK = 128  # rows and keys of a block, the unit in which invisible pairs are skipped
OPTIONS: Any = {"FORCE_USE_FLEX_ATTENTION": True}  # for short queries without gradients too

_refused: set[tuple[Any, ...]] = set()  # device types, dtypes and head dims that did not compile


def fits(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    """Return whether flex_attention takes these tensors, unless it has failed to compile."""
    same = q.dtype == k.dtype == v.dtype and q.shape[-1] == k.shape[-1]
    wide = min(q.shape[-1], v.shape[-1]) >= LEAST_HEAD_DIM
    some = q.numel() > 0 and k.numel() > 0
    return same and wide and some and q.dtype in DTYPES and _kind(q, v) not in _refused


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend `q` to one block of keys: see `forward` of the package."""
    try:
        return _forward(q.detach(), k.detach(), v.detach(), scale, band, cap)
    except Exception as error:  # compilers fail in too many ways to list
        _note_failure(error, q, v)
        return tile.forward(q, k, v, scale, band, cap)


def backward(x: Operands, scale: float, band: Band, cap: float | None = None) -> Gradients:
    """Return one block's term of the gradients: see `backward` of the package."""
    try:
        return _backward(x, scale, band, cap)
    except Exception as error:  # as in forward
        _note_failure(error, x.q, x.v)
        return tile.backward(x, scale, band, cap)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, cap: float | None
) -> tuple[Tensor, Tensor]:
    dtype, device = statistics_dtype(q.dtype), q.device
    numbers = [None if x is None else _constant(x, dtype, device) for x in (scale, cap)]
    mask = block_mask(q.shape[2], k.shape[2], band, device)
    # Otherwise sizes that are equal by chance, as of heads and blocks, get one symbol.
    own_symbols = shapes.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with own_symbols, torch._dynamo.config.patch(recompile_limit=GRAPHS):
        result: tuple[Tensor, Tensor] = _compiled()(
            q.contiguous(), k.contiguous(), v.contiguous(), mask, *numbers
        )
    return result


def _backward(x: Operands, scale: float, band: Band, cap: float | None) -> Gradients:
    q, k, v = (each.detach().contiguous().requires_grad_() for each in (x.q, x.k, x.v))
    with torch.enable_grad():
        out, lse = _forward(q, k, v, scale, band, cap)
    weights = torch.exp(lse.detach() - without_empty_rows(x.lse))
    grad_out = weights.unsqueeze(-1) * x.grad_out
    grad_lse = (grad_out * (out.detach() - x.out)).sum(-1)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (grad_out.to(out.dtype), grad_lse))
    return dq, dk, dv


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_flex, dynamic=True, fullgraph=True)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: Tensor, cap: Tensor | None
) -> tuple[Tensor, Tensor]:
    if not torch.compiler.is_dynamo_compiling():
        raise NotCompiledError("torch.compile is switched off, or does not support this mode")

    def modified(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        score = score * scale
        return score if cap is None else cap * torch.tanh(score / cap)

    # Its own argument `scale` becomes a symbol under dynamic shapes, which kernels cannot read.
    result: tuple[Tensor, Any] = flex_attention(
        q, k, v, modified, mask, 1.0, True, kernel_options=OPTIONS, return_aux=AuxRequest(lse=True)
    )
    out, auxiliary = result
    return out, auxiliary.lse


class NotCompiledError(RuntimeError):
    """flex_attention was not compiled; it would compute all scores at once."""


@lru_cache(maxsize=32)
def block_mask(rows: int, keys: int, band: Band, device: torch.device) -> BlockMask:
    """Return the mask of a band, without the [rows, keys] tensor of `create_block_mask`."""
    low = -rows if band[0] is None else max(band[0], -rows)
    high = keys if band[1] is None else min(band[1], keys)
    with torch.inference_mode(False), torch.no_grad():
        lower, upper = (torch.full((), x, device=device) for x in (low, high))
        first_row, last_row = (x.unsqueeze(1) for x in _block_ends(rows, device))
        first_key, last_key = _block_ends(keys, device)
        nearest, farthest = first_key - last_row, last_key - first_row
        seen = (farthest >= low) & (nearest <= high)
        whole = (nearest >= low) & (farthest <= high)
        whole &= (last_row - first_row == BLOCK - 1) & (last_key - first_key == BLOCK - 1)

        def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (key - row >= lower) & (key - row <= upper)

        lists = *_list_blocks(seen & ~whole), *_list_blocks(whole)
        return BlockMask.from_kv_blocks(*lists, BLOCK, sees, (rows, keys))


def _block_ends(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first and the last index of each block."""
    first = torch.arange(0, length, BLOCK, device=device)
    return first, (first + BLOCK - 1).clamp(max=length - 1)


def _list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's number of selected blocks, and its block indices, selected ones first."""
    order = blocks.byte().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


@lru_cache(maxsize=32)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((), value, dtype=dtype, device=device)


def _kind(q: Tensor, v: Tensor) -> tuple[Any, ...]:
    return q.device.type, q.dtype, q.shape[-1], v.shape[-1]


def _note_failure(error: Exception, q: Tensor, v: Tensor) -> None:
    """Warn that the tile computes a block, and all of its kind if it does not compile."""
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        raise error
    kind = _kind(q, v)
    if not isinstance(error, NotCompiledError):  # a later call may be compiled
        _refused.add(kind)
    device, dtype, dim, value_dim = kind
    first, *_ = (*str(error).splitlines(), "")
    warnings.warn(
        f"flex_attention does not run on {device} for {dtype} and head dims {dim} and "
        f"{value_dim}: such attention is computed by plain matrix products, which take "
        f"hundreds of times as long ({type(error).__name__}: {first[:200]})",
        stacklevel=3,
    )
