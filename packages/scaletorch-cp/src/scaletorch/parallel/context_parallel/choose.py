"""Which method to attend by, and why."""

from __future__ import annotations

from torch import Tensor

FEW = 256  # positions on a rank: below this a hop around the ring takes longer than its block


def choose_method(q: Tensor, k: Tensor, size: int) -> tuple[str, str]:
    """Return the method that "auto" takes, and the reason.

    Args:
        q: This rank's queries [B, H, L, D].
        k: Its keys [B, K, L, D].
        size: Number of ranks.

    Example:
        >>> choose_method(q, k, 4)
        ('ring', 'keys and values travel while blocks are computed')
    """
    heads, kv_heads, length = q.shape[1], k.shape[1], q.shape[2]
    if size == 1:
        return "ring", "one rank sends nothing"
    if length < FEW:
        return "all_gather", f"one message for {length} positions a rank, not one for each hop"
    divides = heads % size == 0 and kv_heads % size == 0
    if divides and heads + kv_heads < size * kv_heads:
        sent, around = 2 * (heads + kv_heads) * (size - 1) // size, 2 * kv_heads * (size - 1)
        return "ulysses", f"it sends {sent} heads of a rank's positions, a ring {around}"
    return "ring", "keys and values travel while blocks are computed"
