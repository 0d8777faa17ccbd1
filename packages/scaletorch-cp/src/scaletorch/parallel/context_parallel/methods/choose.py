"""The choice of a method, and the bytes that each method sends."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....dist.errors import InvalidArgumentError
from ..kernels import statistics_dtype
from .call import ulysses_size

FEW = 256  # positions on a rank; with fewer, a hop around the ring takes longer than its block


def choose_method(q: Tensor, k: Tensor, size: int) -> tuple[str, str]:
    """Return the method that "auto" takes, and the reason.

    Args:
        q: This rank's queries [B, H, L, D].
        k: This rank's keys [B, K, L, D].
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
        got = " and ".join(str(list(x.shape)) for x in (q, k))
        raise InvalidArgumentError(f"q and k must be [B, heads, L, D]; they are {got}")
    heads, kv_heads, length = q.shape[1], k.shape[1], q.shape[2]
    if size == 1:
        return "ring", "one rank sends nothing"
    if length < FEW:
        return "all_gather", f"one message for {length} positions a rank, not one for each hop"
    degree = ulysses_size(kv_heads, size)
    sizes = volumes(heads, kv_heads, 1, 1, ranks=size, ulysses_size=degree, dtype=torch.int8)
    around, sent = sizes["ring"].forward, sizes["hybrid"].forward
    if sent < around:
        name = "ulysses" if degree == size else "hybrid"
        return name, f"it sends {sent} heads of a rank's positions, a ring {around}"
    return "ring", "keys and values travel while blocks are computed"


class Volume(NamedTuple):
    """Bytes that one rank sends in a call, without the comparison of the ranks' calls.

    Attributes:
        forward: Bytes of forward.
        backward: Bytes of backward.
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
    ulysses_size: int = 1,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Volume]:
    """Return the bytes that a rank sends, by method, for the methods that these heads fit.

    All four follow one formula: heads are exchanged within subgroups of ranks, and keys and values
    pass from subgroup to subgroup. A ring and all-gather have subgroups of one rank, Ulysses has
    one subgroup of all ranks.

    Args:
        heads: Query heads, H.
        kv_heads: Key/value heads, K; it divides H.
        length: Positions on a rank, L.
        head_dim: D.
        ranks: Number of ranks, N.
        ulysses_size: Ranks of a subgroup of "hybrid", U; it divides N.
        batch: B.
        dtype: Dtype of q, k and v. Gradients travel in float32 at least.

    Raises:
        InvalidArgumentError: A size below 1, or `ulysses_size` does not divide `ranks`.
    """
    sizes = {"heads": heads, "kv_heads": kv_heads, "length": length, "head_dim": head_dim}
    for name, size in (sizes | {"ranks": ranks, "batch": batch}).items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidArgumentError(f"{name} must be a whole number, at least 1; it is {size!r}")
    if ulysses_size < 1 or ranks % ulysses_size:
        raise InvalidArgumentError(f"subgroups of {ulysses_size} ranks do not divide {ranks} ranks")
    degrees = {"ring": 1, "all_gather": 1, "ulysses": ranks, "hybrid": ulysses_size}
    head = batch * length * head_dim
    return {
        method: _volume(heads * head, _copied(kv_heads, size) * head, dtype, ranks, size)
        for method, size in degrees.items()
        if heads % size == 0 and _copied(kv_heads, size) % size == 0
    }


def _volume(queries: int, keys: int, dtype: torch.dtype, ranks: int, degree: int) -> Volume:
    """Return the bytes for a rank's elements of queries, and of keys counted with their copies."""
    item, wide = dtype.itemsize, statistics_dtype(dtype).itemsize
    both, hops = 2 * keys, ranks // degree - 1
    swapped, gradients = 2 * queries + both, queries * item + (queries + both) * wide
    return Volume(
        swapped * item * (degree - 1) // degree + hops * both * item,
        gradients * (degree - 1) // degree + hops * both * (item + wide),
    )


def _copied(kv_heads: int, degree: int) -> int:
    """Return the number of key/value heads, with copies if a subgroup has more ranks."""
    return max(kv_heads, degree) if degree % kv_heads == 0 else kv_heads
