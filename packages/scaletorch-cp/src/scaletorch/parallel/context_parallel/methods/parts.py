"""A ring as two: parts of neighbours that share out heads, and rings that go across the parts."""

from __future__ import annotations

from math import gcd
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....dist import all_gather, get_comm_device
from ....dist.errors import InvalidArgumentError
from ..cp_comms import Ring, ring_of

Parts: TypeAlias = tuple[Ring, Ring]  # this rank's neighbours, and its peers in the other parts
Groups: TypeAlias = ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None

_wholes: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], tuple[int, ...]]] = (
    WeakKeyDictionary()
)


def split(ring: Ring, size: int) -> Parts:
    """Divide a ring into parts of `size` neighbours; both rings communicate over its own group.

    Args:
        ring: All ranks.
        size: Ranks of a part; it divides their number.
    """
    part, place = divmod(ring.index, size)
    neighbours = ring.ranks[part * size : (part + 1) * size]
    return Ring(ring.group, neighbours, place), Ring(ring.group, ring.ranks[place::size], part)


def rings_of(group: Groups) -> tuple[Ring, Parts | None]:
    """Return the ring of all ranks, and its parts if a caller has a group for each of the two.

    The first use of a pair of groups communicates over the second.

    Raises:
        NotInGroupError: This rank is outside a group.
        StateError: Several ranks, and neither a group nor a process group manager.
    """
    if not isinstance(group, tuple):
        return ring_of(group), None
    part, across = (ring_of(each) for each in group)
    index = across.index * part.size + part.index
    return Ring(None, _all_ranks(part, across), index), (part, across)


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
        _require_crossing(ring, given)
    parts = given or split(ring, size)
    _check_heads(q, k, parts[0].size)
    return parts


def _check_heads(q: Tensor, k: Tensor, size: int) -> None:
    """Check that query heads divide over `size` ranks, and key/value heads with them.

    Raises:
        InvalidArgumentError: They do not.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads % size or (kv_heads % size and size % kv_heads):
        raise InvalidArgumentError(
            f"Ulysses divides heads over {size} ranks: their number must be a multiple of that, "
            f"and key/value heads a multiple or a divisor; there are {heads} and {kv_heads}; "
            "method='ring' takes any, method='hybrid' divides them as far as it can"
        )


def _require_crossing(ring: Ring, parts: Parts) -> None:
    """Check that the ring across passes through one place of every part.

    Raises:
        InvalidArgumentError: It does not: heads of different places would be mixed.
    """
    part, across = parts
    expected = ring.ranks[part.index :: part.size]
    if across.ranks != expected:
        raise InvalidArgumentError(
            f"a pair of groups must cross: this rank has place {part.index} in its part "
            f"{part.ranks}, and the ranks of that place in all parts are {expected}; the second "
            f"group has {across.ranks}"
        )


def _all_ranks(part: Ring, across: Ring) -> tuple[int, ...]:
    """Return the ranks of all parts, in the order of their shares."""
    if across.group is None:
        return part.ranks
    known = _wholes.setdefault(across.group, {})
    if part.ranks not in known:
        mine = torch.tensor(part.ranks, device=get_comm_device(across.group))
        known[part.ranks] = tuple(torch.cat(all_gather(mine, across.group)).tolist())
    return known[part.ranks]
