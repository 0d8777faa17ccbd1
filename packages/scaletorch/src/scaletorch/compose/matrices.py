"""Exchange matrices: gradient shards to owners, weight shards back, one all-to-all per dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Size, Tensor, nn
from torch.distributed import ProcessGroup

from ..dist import all_gather_object, get_comm_device, get_rank, get_world_size
from ..dist.building import all_to_all_flat
from ..dist.errors import MismatchError
from ..parallel.data_parallel import Shard
from ..parallel.pg_manager import ProcessGroupManager, describe_rank
from ..parallel.tensor_parallel.building import ParameterCut

Key = tuple[int, str]  # pipeline stage and parameter name


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter that is cut over tp, of which this rank has a shard.

    Attributes:
        shard: The tensor that this rank's optimizer was given for it.
        cut: The cut over tp.
        holders: The ranks of the exchanging group that have the shards, in tp order.
        owner: The holder that updates the whole matrix.
    """

    shard: Shard
    cut: ParameterCut
    holders: tuple[int, ...]
    owner: int

    def shape_on(self, holder: int) -> Size:
        """Return the shape of a holder's shard."""
        shape = list(self.shard.tensor.shape)
        shape[self.cut.dim] = self.cut.cut.sizes[self.holders.index(holder)]
        return Size(shape)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Join the shards of all holders, in their order, to the whole matrix."""
        joined = torch.cat(list(shards), self.cut.dim)
        return self.cut.cut.arrange(joined, self.cut.dim)

    def take(self, whole: Tensor, holder: int) -> Tensor:
        """Return a holder's shard of the whole matrix."""
        return self.cut.cut.take(whole, self.cut.dim, self.holders.index(holder))


def share_out(
    held: Sequence[tuple[Shard, ParameterCut]],
    group: ProcessGroup | None,
    manager: ProcessGroupManager,
) -> list[Matrix]:
    """Choose an owner for each matrix, the same on all ranks; return this rank's matrices.

    The ranks of `group` together have all shards of each matrix, and all call.
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
        found.append(Matrix(shard, cut, ranks, owners[key]))
    return found


def exchanging_group(names: Sequence[str], manager: ProcessGroupManager) -> ProcessGroup | None:
    """Return the group in which shards go to their owners; all ranks call.

    This is the tp group if its ranks have shards of the same parameters, and the world if not. They
    may differ with a sharded optimizer and tp shards of unequal sizes.
    """
    alike = all(other == list(names) for other in all_gather_object(list(names), manager.tp_group))
    if all(all_gather_object(alike, manager.world_group)):
        return manager.tp_group
    return manager.world_group


class Exchange:
    """The exchange of matrices of one dtype between the ranks of a group.

    `wholes` are the matrices that this rank owns, each with the whole parameter that the optimizer
    updates.
    """

    def __init__(
        self, matrices: Sequence[Matrix], dtype: torch.dtype, group: ProcessGroup | None
    ) -> None:
        self.matrices, self._dtype, self._group = list(matrices), dtype, group
        self._rank, self._size = get_rank(group), get_world_size(group)
        self.wholes: list[tuple[Matrix, nn.Parameter]] = []
        for matrix in self.matrices:
            if matrix.owner == self._rank:
                like = matrix.shard.tensor
                whole = like.new_empty(matrix.cut.whole(like.shape))
                self.wholes.append((matrix, nn.Parameter(whole)))
        self._versions: list[int] = []
        self._read_weights()
        self.note_versions()

    def note_versions(self) -> None:
        """Record that owners have the current values of the shards."""
        self._versions = self._current_versions()

    @torch.no_grad()
    def read(self) -> None:
        """Send gradients to owners, and weights too if any shard has been written to."""
        written = self._versions != self._current_versions()
        found, anywhere = self._to_owners(lambda matrix: matrix.shard.tensor.grad, written)
        for (_, whole), gradient in zip(self.wholes, found, strict=True):
            whole.grad = gradient
        if anywhere:
            self._read_weights()

    @torch.no_grad()
    def write(self) -> None:
        """Send all ranks their shards of the owners' new weights; drop the owners' gradients."""
        sent: list[list[Tensor]] = [[] for _ in range(self._size)]
        for matrix, whole in self.wholes:
            whole.grad = None
            for holder in matrix.holders:
                sent[holder].append(matrix.take(whole.detach(), holder))
        expected = [
            [each.shard.tensor.numel() for each in self.matrices if each.owner == rank]
            for rank in range(self._size)
        ]
        received = self._pass(sent, expected)
        for matrix in self.matrices:
            shard = matrix.shard.tensor
            shard.copy_(received[matrix.owner].pop(0).view(shard.shape))

    @torch.no_grad()
    def _read_weights(self) -> None:
        found, _ = self._to_owners(lambda matrix: matrix.shard.tensor)
        for (_, whole), value in zip(self.wholes, found, strict=True):
            if value is not None:
                whole.copy_(value)

    def _to_owners(
        self, tensor_of: Callable[[Matrix], Tensor | None], told: bool = False
    ) -> tuple[list[Tensor | None], bool]:
        """Return the whole tensor of each matrix that this rank owns; None if no shard has one.

        Also return whether `told` is True on any rank of the group.
        """
        sent = []
        for owner in range(self._size):
            theirs = [each for each in self.matrices if each.owner == owner]
            tensors = [tensor_of(each) for each in theirs]
            head = torch.tensor([told, *(each is not None for each in tensors)])
            filled = (
                torch.zeros_like(each.shard.tensor) if tensor is None else tensor
                for each, tensor in zip(theirs, tensors, strict=True)
            )
            sent.append([head, *filled])
        received = self._pass(sent, [self._sizes_from(rank) for rank in range(self._size)])
        heads = [each.pop(0).tolist() for each in received]
        anywhere = any([head.pop(0) for head in heads])
        found: list[Tensor | None] = []
        for matrix, whole in self.wholes:
            there = any([heads[holder].pop(0) for holder in matrix.holders])
            shards = [
                received[holder].pop(0).view(matrix.shape_on(holder)) for holder in matrix.holders
            ]
            found.append(matrix.join(shards).to(whole.device) if there else None)
        return found, anywhere

    def _sizes_from(self, holder: int) -> list[int]:
        """Return the sizes of the header and of each shard that this rank receives from another."""
        owned = [matrix for matrix, _ in self.wholes if holder in matrix.holders]
        return [1 + len(owned), *(matrix.shape_on(holder).numel() for matrix in owned)]

    def _pass(
        self, sent: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[int]]
    ) -> list[list[Tensor]]:
        """Send each rank its tensors, and return those from each rank, flat."""
        # Device and dtype must not depend on the tensors: a rank may have none to send.
        device = get_comm_device(self._group)
        flat = [each.flatten().to(device, self._dtype) for each in chain(*sent)]
        data = torch.cat([torch.empty(0, dtype=self._dtype, device=device), *flat])
        counts = [sum(each.numel() for each in some) for some in sent]
        totals = [sum(sizes) for sizes in expected]
        received = all_to_all_flat(data, counts, totals, self._group).wait()
        parts = zip(received.split(totals), expected, strict=True)
        return [list(part.split(list(sizes))) for part, sizes in parts]

    def _current_versions(self) -> list[int]:
        shards = [matrix.shard for matrix in self.matrices]
        return [each for s in shards for each in (s.tensor._version, s.parameter._version)]
