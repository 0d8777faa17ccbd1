"""Communicators and connections opened before a step, on devices whose streams run the calls.

NCCL and its like open a group's communicator at its first call, which all members must make, and
connect two ranks when they first exchange a message; both block the host. In the middle of a step
one of them may be waiting for a third rank. Gloo connects all members when a group is made.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed import ProcessGroup

from ...dist import all_reduce, exchange, get_comm_device, get_rank, group_ranks
from ...dist.building import all_to_all_flat


def has_streams(group: ProcessGroup | None = None) -> bool:
    """Return whether streams of a device run the calls of a group, by default the default group."""
    return get_comm_device(group).type != "cpu"


def connect(group: ProcessGroup | None, pairs: Iterable[tuple[int, int]] = ()) -> None:
    """Open a group, and connect pairs of its ranks both ways; all ranks call it.

    Every rank goes through the pairs in the same order, so none waits for a rank that waits for it.

    Args:
        group: The ranks. Nothing happens on the CPU or for one rank.
        pairs: Their places in the group, the lower one first; the same on every rank.
    """
    if group is None or group.size() == 1 or not has_streams(group):
        return
    ranks, device = group_ranks(group), get_comm_device(group)
    own = ranks.index(get_rank())
    # A batch of messages between some of the ranks may not be the first call on a communicator.
    all_reduce(torch.zeros(1, device=device), group=group)
    for low, high in sorted(pairs, key=lambda pair: (pair[0] % 2, pair)):  # every other at a time
        if own in (low, high):
            peer = ranks[low + high - own]
            sent, received = torch.zeros(1, device=device), torch.empty(1, device=device)
            exchange([(sent, peer)], [(received, peer)], group)


def connect_all(group: ProcessGroup | None) -> None:
    """Connect all pairs of a group's ranks, for its all-to-alls; all ranks call it."""
    if group is None or group.size() == 1 or not has_streams(group):
        return
    ones = [1] * group.size()
    all_to_all_flat(
        torch.zeros(group.size(), device=get_comm_device(group)), ones, ones, group
    ).wait()
