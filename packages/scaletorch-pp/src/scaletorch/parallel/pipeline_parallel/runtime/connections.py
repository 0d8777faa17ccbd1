"""Connections between the ranks of a pipeline, made before any of them computes.

NCCL and its like connect two ranks when they first exchange a message, and block both hosts until
that is done. In the middle of a step one of the two may be waiting for a third rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import torch
from torch.distributed import ProcessGroup

from ....dist import all_reduce, exchange, get_comm_device, get_rank, group_ranks
from ...pg_manager.building import groups_within


def neighbours(stages: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the pairs of places in a pipeline that exchange hidden states, each once.

    Args:
        stages: Each rank's stages, chunk by chunk.
    """
    homes = {stage: place for place, own in enumerate(stages) for stage in own}
    crossings = ({homes[stage], homes[stage + 1]} for stage in range(len(homes) - 1))
    return sorted({(min(each), max(each)) for each in crossings if len(each) == 2})


def connect(group: ProcessGroup, pairs: Iterable[tuple[int, int]]) -> None:
    """Exchange a small message, both ways, between the ranks of each pair; all ranks call it.

    Every rank goes through the pairs in the same order, so none waits for a rank that waits for it.

    Args:
        group: The ranks.
        pairs: Their places in the group, the lower one first; the same on every rank.
    """
    ranks, device = group_ranks(group), get_comm_device(group)
    own = ranks.index(get_rank())
    # The first call on a group must be made by all of its ranks.
    all_reduce(torch.zeros(1, device=device), group=group)
    for low, high in sorted(pairs, key=lambda pair: (pair[0] % 2, pair)):  # every other at a time
        if own in (low, high):
            peer = ranks[low + high - own]
            sent, received = torch.zeros(1, device=device), torch.empty(1, device=device)
            exchange([(sent, peer)], [(received, peer)], group)


def groups_of_owners(
    group: ProcessGroup, several: Iterable[tuple[int, ...]], number: int
) -> dict[tuple[int, ...], ProcessGroup]:
    """Make and connect a group for each set of owners of tied parameters; all ranks call it.

    On the pipeline's own group they would exchange beside messages of ranks that own nothing.

    Args:
        group: The pipeline.
        several: The owners' places in it, in one order on all ranks.
        number: From where torch's group names count, agreed by all ranks.

    Returns:
        The groups of this rank, by the owners' places.
    """
    ranks = group_ranks(group)
    owners_of = {tuple(ranks[place] for place in owners): owners for owners in several}
    groups = groups_within(group, owners_of, number)
    for members, own in groups.items():
        connect(own, combinations(range(len(members)), 2))
    return {owners_of[members]: own for members, own in groups.items()}
