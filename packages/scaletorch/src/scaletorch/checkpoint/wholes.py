"""Whole tensors of a stage, gathered one by one; those of a list's experts from their ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..dist import all_gather_object, broadcast, functional, get_rank, group_ranks
from .state.held import Held


class Whole(NamedTuple):
    """A tensor of the plain model.

    Attributes:
        name: The name that it is saved by.
        dtype: Its dtype.
        shape: Its shape.
        held: What is here of it; None if it is of a list's expert that another rank has.
        owner: The global rank that has it, if it is of a list's expert.
        beside: An expert that is here, if it is of a list's.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    held: Held | None
    owner: int | None = None
    beside: Held | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def find_wholes(held: Iterable[Held]) -> list[Whole]:
    """Return what there is to gather, in one order on all ranks that have experts of one another.

    They all call it if there are experts in lists.
    """
    every, listed = [], []
    for each in held:
        if each.experts is not None and each.experts.dim is None:
            listed.append(each)
        else:
            every.append(_whole(each))
    if listed and listed[0].experts is not None:
        every += _of_lists(listed, listed[0].experts.group)
    return every


@torch.no_grad()
def gather_whole(whole: Whole) -> Tensor:
    """Return the whole tensor; the ranks that have parts of it call this for one after another."""
    each = whole.held
    if each is None:
        near = None if whole.beside is None else whole.beside.tensor.device
        tensor = torch.empty(whole.shape, dtype=whole.dtype, device=near)
    else:
        tensor = each.tensor.detach()
        if each.cut is not None:
            tensor = each.cut.join(tensor)
    if whole.owner is not None:
        tensor = tensor.contiguous()
        broadcast(tensor, whole.owner, _group(whole))
    elif each is not None and each.experts is not None:
        sizes = [len(own) for own in each.experts.ranges]
        tensor = functional.gather(tensor, 0, each.experts.group, sizes=sizes)
    return tensor


def _whole(each: Held) -> Whole:
    return Whole(each.name, each.tensor.dtype, tuple(each.shape), each)


def _of_lists(listed: Sequence[Held], group: ProcessGroup | None) -> list[Whole]:
    own = {each.name: each for each in listed}
    told = [(each.name, str(each.tensor.dtype), tuple(each.shape)) for each in listed]
    found: dict[str, Whole] = {}
    for rank, entries in zip(group_ranks(group), all_gather_object(told, group), strict=True):
        for name, dtype, shape in entries:
            kind = getattr(torch, dtype.removeprefix("torch."))
            here = own.get(name) if rank == get_rank() else None
            found[name] = Whole(name, kind, tuple(shape), here, rank, listed[0])
    return list(found.values())


def _group(whole: Whole) -> ProcessGroup | None:
    experts = None if whole.beside is None else whole.beside.experts
    return None if experts is None else experts.group
