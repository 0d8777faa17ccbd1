"""Which rank updates which matrix: one that has a shard of it, and has least to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Size, Tensor
from torch.distributed import ProcessGroup

from ...dist import all_gather_object
from ...dist.errors import MismatchError
from ...parallel.data_parallel import Shard
from ...parallel.pg_manager import ProcessGroupManager, describe_rank
from ...parallel.tensor_parallel.building import ParameterCut

Key = tuple[int, str]  # a stage of the pipeline, and a parameter's name there


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter that is cut over tp, of which this rank has a shard.

    Attributes:
        name: The parameter's.
        shard: What the optimizer was given for it on this rank.
        cut: How it is cut.
        holders: The ranks of the exchanging group that have the shards, in tp order.
        owner: The one of these that updates it.
    """

    name: str
    shard: Shard
    cut: ParameterCut
    holders: tuple[int, ...]
    owner: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole's."""
        return self.cut.whole(self.shard.tensor.shape)

    def shape_on(self, holder: int) -> Size:
        """Return the shape of a holder's shard."""
        shape = list(self.shard.tensor.shape)
        shape[self.cut.dim] = self.cut.cut.sizes[self.holders.index(holder)]
        return Size(shape)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the whole, given the shards of all holders in their order."""
        joined = torch.cat(list(shards), self.cut.dim)
        return self.cut.cut.arrange(joined, self.cut.dim)

    def take(self, whole: Tensor, holder: int) -> Tensor:
        """Return a holder's shard of the whole."""
        return self.cut.cut.take(whole, self.cut.dim, self.holders.index(holder))


def share_out(
    held: Sequence[tuple[Shard, ParameterCut]],
    group: ProcessGroup | None,
    manager: ProcessGroupManager,
) -> list[Matrix]:
    """Return this rank's matrices with their owners, the same ones on all ranks.

    Args:
        held: The shards that this rank's optimizer has, and how they are cut.
        group: Ranks that have all shards of each of these among them; all of them call.
        manager: The grid.

    Raises:
        MismatchError: Some tp ranks' optimizers have a parameter, and others have not.
    """
    mine = {(manager.pp_rank, shard.name): shard.parameter.numel() for shard, _ in held}
    told = all_gather_object((manager.tp_rank, mine), group)
    holders: dict[Key, dict[int, int]] = {}  # tp rank -> rank of the group
    sizes: dict[Key, int] = {}
    for rank, (tp, theirs) in enumerate(told):
        for key, size in theirs.items():
            holders.setdefault(key, {})[tp] = rank
            sizes[key] = sizes.get(key, 0) + size
    incomplete = sorted(key[1] for key, of in holders.items() if len(of) < manager.tp_size)
    if incomplete:
        raise MismatchError(
            f"{describe_rank()}: the optimizers of some tensor-parallel ranks have "
            f"{', '.join(incomplete[:4])}, and those of others have not: give all the same"
        )
    loads = [0] * len(told)
    owners: dict[Key, int] = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        owner = min(holders[key].values(), key=lambda rank: (loads[rank], rank))
        loads[owner] += sizes[key]
        owners[key] = owner
    found = []
    for shard, cut in sorted(held, key=lambda each: each[0].name):
        key = manager.pp_rank, shard.name
        ranks = tuple(rank for _, rank in sorted(holders[key].items()))
        found.append(Matrix(shard.name, shard, cut, ranks, owners[key]))
    return found


def exchanging_group(names: Sequence[str], manager: ProcessGroupManager) -> ProcessGroup | None:
    """Return the ranks among which matrices go to their owners; all ranks call.

    These are the tp ranks, if each has the same of the model. With a sharded optimizer and tp
    shards of unlike sizes they may not, and all ranks take part.

    Args:
        names: What this rank has.
        manager: The grid.
    """
    alike = all(other == list(names) for other in all_gather_object(list(names), manager.tp_group))
    if all(all_gather_object(alike, manager.world_group)):
        return manager.tp_group
    return manager.world_group
