"""A ring as two: parts of neighbours that share out heads, and rings that go across the parts."""

from __future__ import annotations

from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
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
    """Return the ring of all ranks, and its parts where a caller has a group for each of the two.

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


def require_crossing(ring: Ring, parts: Parts) -> None:
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
