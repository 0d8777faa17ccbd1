"""Which method to attend by, and why."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from ....dist.errors import InvalidArgumentError
from ..cp_comms import Ring
from .parts import Parts, require_crossing, split
from .ulysses import check_heads
from .volumes import volumes

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


def part_size(kv_heads: int, size: int) -> int:
    """Return over how many of `size` ranks "hybrid" divides heads, without replicating any."""
    return gcd(kv_heads, size)


def parts_for(method: str, q: Tensor, k: Tensor, ring: Ring, given: Parts | None) -> Parts:
    """Return how a method divides the ranks: into those that exchange heads, and rings across.

    Raises:
        InvalidArgumentError: The heads do not divide over a part; or a caller's two groups for a
            method that needs one.
    """
    if given is not None and method != "hybrid":
        raise InvalidArgumentError(
            f"a pair of groups is for method='hybrid', heads over the first and a ring over the "
            f"second; method={method!r} needs one group of all ranks"
        )
    size = {"ulysses": ring.size, "hybrid": part_size(k.shape[1], ring.size)}.get(method, 1)
    if given is not None:
        require_crossing(ring, given)
    parts = given or split(ring, size)
    check_heads(q, k, parts[0].size)
    return parts
