"""Methods of attention over sharded sequences: a table, and the choice of "auto"."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from types import ModuleType

from torch import Tensor

from . import all_gather, ring, ulysses

FEW = 256  # positions on a rank; with fewer, a hop of the ring takes longer than its block


# Modules of two functions: forward(q, k, v, call) and backward(grad_out, saved, call).
METHODS: Mapping[str, ModuleType] = {
    "ring": ring,
    "all_gather": all_gather,
    "ulysses": ulysses,  # heads divided over all ranks
    "hybrid": ulysses,  # heads divided over subgroups of ranks, and a ring across them
}


def choose_method(q: Tensor, k: Tensor, size: int) -> tuple[str, str]:
    """Return the method that "auto" takes, and the reason.

    Args:
        q: This rank's queries [B, H, L, D].
        k: This rank's keys [B, K, L, D].
        size: Number of ranks, at least 1.

    Example:
        >>> choose_method(q, k, 4)
        ('ring', 'keys and values travel while blocks are computed')
    """
    heads, kv_heads, length = q.shape[1], k.shape[1], q.shape[2]
    if size == 1:
        return "ring", "one rank sends nothing"
    if length < FEW:
        return "all_gather", f"one message for {length} positions a rank, not one for each hop"
    degree = gcd(kv_heads, size)
    around = 2 * kv_heads * (size - 1)
    exchanged = 2 * (heads + kv_heads) * (degree - 1) // degree
    sent = exchanged + 2 * kv_heads * (size // degree - 1)
    if sent < around:
        name = "ulysses" if degree == size else "hybrid"
        return name, f"it sends {sent} heads of a rank's positions, a ring {around}"
    return "ring", "keys and values travel while blocks are computed"
