"""Which method to attend by, why, and how many bytes each one sends."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....dist.errors import InvalidArgumentError
from ..kernels import statistics_dtype
from .call import part_size

FEW = 256  # positions on a rank: below this a hop around the ring takes longer than its block


def choose_method(q: Tensor, k: Tensor, size: int) -> tuple[str, str]:
    """Return the method that "auto" takes, and the reason.

    Args:
        q: This rank's queries [B, H, L, D].
        k: Its keys [B, K, L, D].
        size: Number of ranks.

    Raises:
        InvalidArgumentError: q or k of other dims, or less than one rank.

    Example:
        >>> choose_method(q, k, 4)
        ('ring', 'keys and values travel while blocks are computed')
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidArgumentError(f"size is a number of ranks, at least 1; it is {size!r}")
    if q.ndim != 4 or k.ndim != 4:
        came = " and ".join(str(list(x.shape)) for x in (q, k))
        raise InvalidArgumentError(f"q and k must be [B, heads, L, D]; they are {came}")
    heads, kv_heads, length = q.shape[1], k.shape[1], q.shape[2]
    if size == 1:
        return "ring", "one rank sends nothing"
    if length < FEW:
        return "all_gather", f"one message for {length} positions a rank, not one for each hop"
    part = part_size(kv_heads, size)
    sizes = volumes(heads, kv_heads, 1, 1, ranks=size, part=part, dtype=torch.int8)
    around, sent = sizes["ring"].forward, sizes["hybrid"].forward
    if sent < around:
        name = "ulysses" if part == size else "hybrid"
        return name, f"it sends {sent} heads of a rank's positions, a ring {around}"
    return "ring", "keys and values travel while blocks are computed"


class Volume(NamedTuple):
    """Bytes that one rank sends in a call, beside the comparison of the ranks' calls.

    Attributes:
        forward: Those of forward.
        backward: Those of backward.
    """

    forward: int
    backward: int


def volumes(
    heads: int,
    kv_heads: int,
    length: int,
    head_dim: int,
    *,
    ranks: int,
    part: int = 1,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Volume]:
    """Return the bytes that a rank sends, by method; absent are those that the heads do not fit.

    All four are one formula: heads are exchanged within parts of ranks, and keys and values pass
    from part to part. A ring and all-gather have parts of one rank, Ulysses one part of all.

    Args:
        heads: Query heads, H.
        kv_heads: Key/value heads, K; it divides H.
        length: Positions on a rank, L.
        head_dim: D.
        ranks: Their number, N.
        part: Ranks of a part of "hybrid", U; it divides N.
        batch: B.
        dtype: Of q, k and v. Gradients travel in float32 at least.

    Raises:
        InvalidArgumentError: A size below 1, or `part` does not divide `ranks`.
    """
    sizes = {"heads": heads, "kv_heads": kv_heads, "length": length, "head_dim": head_dim}
    for name, size in (sizes | {"ranks": ranks, "batch": batch}).items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidArgumentError(f"{name} must be a whole number, at least 1; it is {size!r}")
    if part < 1 or ranks % part:
        raise InvalidArgumentError(f"parts of {part} ranks do not divide {ranks} ranks")
    parts = {"ring": 1, "all_gather": 1, "ulysses": ranks, "hybrid": part}
    head = batch * length * head_dim
    return {
        method: _volume(heads * head, _copied(kv_heads, size) * head, dtype, ranks, size)
        for method, size in parts.items()
        if heads % size == 0 and _copied(kv_heads, size) % size == 0
    }


def _volume(queries: int, keys: int, dtype: torch.dtype, ranks: int, part: int) -> Volume:
    """Return bytes, of a rank's elements of queries, and of keys as often as heads are copied."""
    item, wide = dtype.itemsize, statistics_dtype(dtype).itemsize
    both, hops = 2 * keys, ranks // part - 1
    swapped, gradients = 2 * queries + both, queries * item + (queries + both) * wide
    return Volume(
        swapped * item * (part - 1) // part + hops * both * item,
        gradients * (part - 1) // part + hops * both * (item + wide),
    )


def _copied(kv_heads: int, part: int) -> int:
    """Return the key/value heads with their copies, if there are fewer than ranks in a part."""
    return max(kv_heads, part) if part % kv_heads == 0 else kv_heads
