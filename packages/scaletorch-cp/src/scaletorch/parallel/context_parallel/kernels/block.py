"""The common interface of all kernels: the dtype of sums, the operands of backward, the merge.

A kernel attends to one block of keys. `merge_into` combines the results of blocks.

Shapes: out [B, H, L, D], lse [B, H, L]; lse is the natural logarithm of the sum of exponentials,
−inf if a row has seen nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import CAUSAL, FULL, Band

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k, v


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over keys and over ranks are kept for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Operands(NamedTuple):
    """Operands of the backward of attention over some keys, in the order of PyTorch's operators."""

    grad_out: Tensor  # gradient of the merged output, [B, H, L, Dv]
    q: Tensor  # [B, H, L, D]
    k: Tensor  # [B, K, S, D]; K divides H
    v: Tensor  # [B, K, S, Dv]
    out: Tensor  # merged output [B, H, L, Dv], in q's dtype or in `statistics_dtype`
    lse: Tensor  # merged log-sum-exp [B, H, L]

    def select(self, rows: slice, keys: slice) -> Operands:
        """Return the operands of some rows and keys."""
        grad_out, q, out, lse = (x[:, :, rows] for x in (self.grad_out, self.q, self.out, self.lse))
        return Operands(grad_out, q, self.k[:, :, keys], self.v[:, :, keys], out, lse)

    def expand_heads(self) -> Operands:
        """Return the operands with keys and values repeated for every query head."""
        heads = self.q.shape[1]
        return self._replace(k=expand_heads(self.k, heads), v=expand_heads(self.v, heads))


def same_sizes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether tensors have one dtype and one head dim, and are not empty."""
    same = q.dtype == k.dtype == v.dtype and q.shape[-1] == k.shape[-1] == v.shape[-1]
    return same and q.numel() > 0 and k.numel() > 0


def is_causal(q: Tensor, k: Tensor, band: Band) -> bool:
    """Return whether a band is CAUSAL on a square: operators have an option for that."""
    return band == CAUSAL and q.shape[2] == k.shape[2]


def is_plain(q: Tensor, k: Tensor, band: Band) -> bool:
    """Return whether a band is supported by all operators: FULL, or CAUSAL on a square."""
    return band == FULL or is_causal(q, k, band)


def with_unit_stride(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in this dtype and with stride 1 in the last dim, which kernels require."""
    x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """Return keys or values [B, K, S, D] repeated for every query head, [B, H, S, D]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def sum_groups(grad: Tensor, kv_heads: int) -> Tensor:
    """Return gradients [B, H, S, D] of expanded heads as [B, K, S, D], in `statistics_dtype`."""
    dtype = statistics_dtype(grad.dtype)
    if grad.shape[1] == kv_heads:
        return grad.to(dtype)
    return torch.unflatten(grad, 1, (kv_heads, -1)).sum(2, dtype=dtype)


def without_empty_rows(lse: Tensor) -> Tensor:
    """Return lse with +inf for −inf: weights exp(score − lse) of such rows are 0, not NaN."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


Fits = Callable[[Tensor, Tensor, Tensor, Band], bool]
Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., Gradients]


class Kernel(NamedTuple):
    """A kernel for one block: see `forward` and `backward` of the package."""

    name: str
    fits: Fits  # whether the kernel can compute these q, k, v and band
    forward: Forward  # (q, k, v, scale, band) -> out, lse
    backward: Backward  # (operands, scale, band) -> dq, dk, dv
    caps: bool = False  # whether both also take a cap of the scores, after the band


def update_out_and_lse(
    out: Tensor | None, lse: Tensor | None, block_out: Tensor, block_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over one more block of keys into the result over earlier blocks.

    Rows that have seen nothing on either side (both lse −inf) keep out, and lse −inf.

    Args:
        out: Merged output so far [B, H, L, D]; None before the first block.
        lse: Its log-sum-exp [B, H, L]; None before the first block.
        block_out: The block's output [B, H, L, D].
        block_lse: The block's log-sum-exp [B, H, L].

    Returns:
        The new out and lse, in float32 (float64 for float64); no argument is changed.
    """
    dtype = statistics_dtype(block_lse.dtype)
    block_out, block_lse = block_out.to(dtype), block_lse.to(dtype)
    if out is None or lse is None:
        return block_out, block_lse
    out, lse = out.to(dtype), lse.to(dtype)
    share = _share(lse, block_lse)
    return out + share * (block_out - out), torch.logaddexp(lse, block_lse)


def merge_into(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge as `update_out_and_lse` does, in place, in a quarter of the time.

    `out` and `lse`, in `statistics_dtype`, are 0 and −inf before the first block. They may be
    views, so that a block of some rows is merged into these alone.
    """
    out.lerp_(block_out.to(out.dtype), _share(lse, block_lse).to(out.dtype))
    torch.logaddexp(lse, block_lse, out=lse)


def _share(lse: Tensor, block_lse: Tensor) -> Tensor:
    """Return the block's weight in the merged result [B, H, L, 1]."""
    # −inf minus −inf is NaN: such a row keeps its result.
    gap = torch.where(block_lse == -torch.inf, block_lse, block_lse - lse)
    return torch.sigmoid(gap).unsqueeze(-1)
