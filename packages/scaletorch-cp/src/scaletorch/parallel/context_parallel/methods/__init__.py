"""Methods of attention over sharded sequences: a table, and the choice of "auto"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from ....dist.errors import InvalidArgumentError
from . import all_gather, ring, ulysses
from .call import Call, Saved, WithSinks, ulysses_size

FEW = 256  # positions on a rank; with fewer, a hop of the ring takes longer than its block


class Method(Protocol):
    """A method of attention: a module of two functions."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved]:
        """Return this rank's output [B, H, L, D] in q's dtype, and the tensors for backward."""

    def backward(self, grad_out: Tensor, saved: Saved, call: Call) -> WithSinks:
        """Return this rank's dq, dk, dv and its partial sum of dsinks, in float32 at least."""


METHODS: Mapping[str, Method] = {
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
    around = 2 * kv_heads * (size - 1)
    exchanged = 2 * (heads + kv_heads) * (degree - 1) // degree
    sent = exchanged + 2 * kv_heads * (size // degree - 1)
    if sent < around:
        name = "ulysses" if degree == size else "hybrid"
        return name, f"it sends {sent} heads of a rank's positions, a ring {around}"
    return "ring", "keys and values travel while blocks are computed"
