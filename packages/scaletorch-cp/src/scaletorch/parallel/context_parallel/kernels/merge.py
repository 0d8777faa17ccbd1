"""The merge of attention over several blocks of keys, and the dtype that it is kept in.

Shapes: out [B, H, L, D], lse [B, H, L]; lse is the natural logarithm of the sum of exponentials,
−inf where a row has seen nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over keys and over ranks are kept for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def update_out_and_lse(
    out: Tensor | None, lse: Tensor | None, block_out: Tensor, block_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over one more block of keys into the result over the blocks before.

    Rows of which neither side has seen anything (both lse −inf) keep out as it is and lse −inf.

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
    """Merge as `update_out_and_lse` does, in place: `out` and `lse` become the new ones.

    A quarter of the time, and no new memory of out's size. `out` and `lse` are in
    `statistics_dtype`, and may be views, so that a block of some rows is merged into these alone.

    Args:
        out: Merged output so far [B, H, L, D]; 0 before the first block.
        lse: Its log-sum-exp [B, H, L]; −inf before the first block.
        block_out: The block's output [B, H, L, D].
        block_lse: The block's log-sum-exp [B, H, L].
    """
    out.lerp_(block_out.to(out.dtype), _share(lse, block_lse).to(out.dtype))
    torch.logaddexp(lse, block_lse, out=lse)


def _share(lse: Tensor, block_lse: Tensor) -> Tensor:
    """Return the block's weight in the merged result [B, H, L, 1]."""
    # −inf minus −inf is NaN: such a row takes nothing of the block.
    gap = torch.where(block_lse == -torch.inf, block_lse, block_lse - lse)
    return torch.sigmoid(gap).unsqueeze(-1)
