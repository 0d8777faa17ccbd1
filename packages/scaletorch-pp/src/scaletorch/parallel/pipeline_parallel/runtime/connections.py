"""Connections between the ranks of a pipeline, made before any of them computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from torch.distributed import ProcessGroup

from ....dist import group_ranks
from ...pg_manager.building import connect, groups_within


def neighbours(stages: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the pairs of places in a pipeline that exchange hidden states, each once.

    Args:
        stages: Each rank's stages, chunk by chunk.
    """
    homes = {stage: place for place, own in enumerate(stages) for stage in own}
    crossings = ({homes[stage], homes[stage + 1]} for stage in range(len(homes) - 1))
    return sorted({(min(each), max(each)) for each in crossings if len(each) == 2})


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
