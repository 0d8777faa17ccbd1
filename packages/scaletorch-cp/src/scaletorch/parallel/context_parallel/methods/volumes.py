"""How many bytes each method sends, as data."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ....dist.errors import InvalidArgumentError
from ..kernels.merge import statistics_dtype


class Volume(NamedTuple):
    """Bytes that one rank sends in a call, beside the comparison of what all ranks brought.

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
    """Return what a rank sends by each method; methods that the heads do not divide for are absent.

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
    """Return the key/value heads with their copies, where there are fewer than ranks in a part."""
    return max(kv_heads, part) if part % kv_heads == 0 else kv_heads
