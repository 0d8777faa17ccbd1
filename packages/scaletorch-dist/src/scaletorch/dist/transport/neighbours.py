"""Which groups' ranks can read one another's memory, and how they take turns at it."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ..errors import MismatchError, RankFailedError, StateError
from ..launchers.host import this_host
from ..wire.backend import gather_ints, raw_all_reduce, route
from ..world.info import group_ranks
from .blocks import VARIABLE
from .reading import read_into

LEAST = 1 << 21  # bytes; smaller tensors go through sockets while ranks take turns
MOST = 64  # addresses that a rank tells at a time, where it needs not one for each rank

Addresses = list[list[int]]  # of every rank, in the group's order
Phase = Callable[[Addresses], None]


@dataclass(frozen=True, slots=True)
class Neighbours:
    """A group whose ranks can read one another's memory.

    Attributes:
        known: The ranks, for as long as others hold their group.
        processes: Of every rank, its process.
        boxes: Of every rank, the address of what it tells the others.
        own: What this rank tells: the bytes of its tensor and addresses, at even calls and at odd.
        calls: Their numbers.
    """

    known: weakref.ref[ProcessGroup]
    processes: tuple[int, ...]
    boxes: tuple[int, ...]
    own: Tensor
    calls: count[int] = field(default_factory=count)

    @property
    def group(self) -> ProcessGroup:
        """The ranks."""
        group = self.known()
        if group is None:
            raise StateError("the process group has been destroyed")
        return group

    def take_turns(self, length: int, addresses: Sequence[int], phases: Sequence[Phase]) -> None:
        """Tell the others what this rank has, then go through phases, each begun by all at once.

        Args:
            length: Bytes, the same on every rank.
            addresses: Of this rank's memory that others may read until the last phase is over.
            phases: Take everybody's addresses; what one reads, an earlier one has written.

        Raises:
            MismatchError: On every rank: the lengths differ.
            RankFailedError: Another rank's phase failed.
        """
        place = next(self.calls) % 2  # a rank that is a call ahead does not write over this one
        self.own[place, : 1 + len(addresses)] = torch.tensor((length, *addresses))
        self._all_well(None)
        everyone: Addresses = []
        for phase in phases:
            error: Exception | None = None
            try:
                everyone = everyone or self._everyones(length, place)
                phase(everyone)
            except Exception as found:  # of whatever kind: the others wait for this rank
                error = found
            self._all_well(error)

    def read(self, data: Tensor, rank: int, address: int) -> None:
        """Fill a contiguous tensor with what lies at an address of the group's rank."""
        if rank != self.group.rank():
            read_into(data, self.processes[rank], address)
        elif data.data_ptr() != address:
            ctypes.memmove(data.data_ptr(), address, data.nbytes)

    def _everyones(self, length: int, place: int) -> Addresses:
        row = torch.empty_like(self.own[0])
        told = []
        for rank, box in enumerate(self.boxes):
            self.read(row, rank, box + place * row.nbytes)
            told.append(row.tolist())
        if any(each[0] != length for each in told):
            ranks = zip(group_ranks(self.group), told, strict=True)
            lengths = ", ".join(f"rank {rank}: {each[0]}" for rank, each in ranks)
            raise MismatchError(f"the ranks' tensors differ in their bytes: {lengths}")
        return [addresses for _, *addresses in told]

    def _all_well(self, error: Exception | None) -> None:
        """Wait for all ranks, and raise on each if any has failed."""
        failed = torch.tensor([int(error is not None)])
        raw_all_reduce(failed, ReduceOp.MAX, self.group)
        if isinstance(error, OSError):
            raise RankFailedError(str(error)) from error
        if error is not None:
            raise error
        if failed.item():
            raise RankFailedError("another rank failed while ranks read one another's memory")


def find(group: ProcessGroup) -> Neighbours | None:
    """Find out whether a group's ranks can read one another's memory; every rank asks.

    They can as neighbours on one Linux host, as one user, if the group has gloo for CPU tensors
    and the system lets them; with `SCALETORCH_SHARED_MEMORY=0` on any rank they do not.
    """
    if group.size() == 1 or route(torch.empty(0), group).backend != "gloo":
        return None
    box = torch.zeros(2, 1 + max(MOST, group.size()), dtype=torch.int64)
    box[0, 0] = os.getpid()
    place = this_host() if os.environ.get(VARIABLE, "1") not in ("", "0") else 0
    rows = gather_ints((place, os.getpid(), box.data_ptr()), group)
    if not place or any(at != place for at, _, _ in rows):
        readable = False
    else:
        readable = all(_readable(process, address) for _, process, address in rows)
    if not all(flag for (flag,) in gather_ints((readable,), group)):
        return None
    _, processes, boxes = zip(*rows, strict=True)
    return Neighbours(weakref.ref(group), processes, boxes, box)


def _readable(process: int, address: int) -> bool:
    probe = torch.empty(1, dtype=torch.int64)
    try:
        read_into(probe, process, address)
    except OSError:
        return False
    return probe.item() == process
