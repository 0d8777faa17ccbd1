"""The process groups of one rank: creating, naming and connecting them.

NCCL and similar backends open a group's communicator at its first call, which all members must
make, and connect two ranks at their first message; both block the host. In the middle of a step
this can deadlock, if one of them waits for a third rank. So groups are opened and connected up
front. Gloo connects all members when it creates a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from ...dist import (
    all_reduce,
    exchange,
    get_backend,
    get_comm_device,
    get_default_group,
    get_rank,
    get_timeout,
    group_ranks,
)
from ...dist.building import agree, all_to_all_flat, one_per_process
from ...dist.errors import InvalidArgumentError
from .grid import AXES, Grid, axis_names

# Distance from the numbers of groups that the program creates itself.
MARGIN = 1000


def first_unused_number() -> int:
    """Return the lowest group number that this process has not used yet."""
    return max(_next_number()[0], len(_torch_names()) + MARGIN)


@contextmanager
def numbered_from(number: int) -> Iterator[None]:
    """Number the groups created in the block `number`, `number + 1` and so on.

    torch names a group created by local synchronisation after its ranks and the number of groups
    this process holds. If that number differs between ranks, members wait under different names for
    ever; and a group created again gets its old name, and with it the addresses of closed sockets.
    So ranks agree on a number that none of them has used, and torch's list is filled up to it.
    """
    names = _torch_names()
    fillers = [object() for _ in range(number - len(names))]
    names.update((filler, f"scaletorch-{index}") for index, filler in enumerate(fillers))
    try:
        yield
    finally:
        _next_number()[0] = len(names)
        for filler in fillers:
            del names[filler]


def _next_number() -> list[int]:
    """Return a list with the next unused number, shared with vendored copies of this package."""
    return one_per_process("group_numbers", lambda: [0])


def _torch_names() -> dict[Any, str]:
    # A torch without this list names groups in another way and needs no fix.
    return getattr(getattr(c10d, "_world", None), "pg_names", {})


# Weak references: torch owns the groups, as in `GroupSet`.
_made: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ReferenceType[ProcessGroup]]]
_made = WeakKeyDictionary()


def groups_within(
    parent: ProcessGroup, wanted: Iterable[tuple[int, ...]], number: int
) -> dict[tuple[int, ...], ProcessGroup]:
    """Return those of the wanted groups that contain this rank; create each once per parent.

    `wanted` lists the global ranks of each group, and `number` is the first in torch's group names;
    both are the same on all ranks of the parent. A wanted group of all its ranks is the parent.
    """
    rank, every = get_rank(), group_ranks(parent)
    known = _made.setdefault(parent, {})
    found = {}
    for place, ranks in enumerate(dict.fromkeys(wanted)):
        if rank not in ranks:
            continue
        group = parent if ranks == every else None
        if group is None and ranks in known:
            group = known[ranks]()
        if group is None:
            with numbered_from(number + place):
                group = torch_dist.new_group(
                    list(ranks),
                    timeout=get_timeout(),
                    use_local_synchronization=True,
                    group_desc="scaletorch_within",
                )
            known[ranks] = ref(group)
        found[ranks] = group
    return found


def destroy_within(parent: ProcessGroup) -> None:
    """Destroy the groups created within a parent group, newest first."""
    for reference in reversed(_made.pop(parent, {}).values()):
        group = reference()
        if group is not None:
            torch_dist.destroy_process_group(group)


def grouped_axis(axis: str) -> str:
    """Return the name in `AXES` for an axis that has groups, such as `"cp_dp"` for `"dp_cp"`."""
    if axis in AXES:
        return axis
    name = {axis_names(each): each for each in AXES}.get(axis_names(axis))
    if name is None:
        legal = ", ".join(AXES)
        raise InvalidArgumentError(f"axis {axis!r} has no process group: expected one of {legal}")
    return name


class GroupSet:
    """One rank's process group for every axis; axes with equal ranks share one group.

    On devices with streams, a pipeline of all ranks gets its own group instead of WORLD: a stream
    runs the calls of a group in order, so a waiting message would block WORLD.

    torch owns the groups; this class holds weak references. Destroying the default group thus
    frees these groups too, and none of their threads can abort the interpreter at exit.
    `first_number` is the first in torch's group names, agreed by all ranks.
    """

    def __init__(self, grid: Grid, rank: int, first_number: int) -> None:
        self._grid, self._rank = grid, rank
        self._by_axis: dict[str, ReferenceType[ProcessGroup]] = {}
        self._created: list[ReferenceType[ProcessGroup]] = []
        problem: Exception | None = None
        try:
            with numbered_from(first_number):
                self._create_all()
        except Exception as error:
            problem = error
        try:
            # Also a barrier until all groups exist: a rank that went on and destroyed a group would
            # cut off members that are still connecting.
            agree("the process groups", [], error=problem)
        except Exception:
            self.destroy()
            raise
        for group in dict.fromkeys(map(self.get, self._by_axis)):
            connect(group)

    def get(self, axis: str) -> ProcessGroup | None:
        """Return the group of one of the `AXES`; None after it was destroyed."""
        reference = self._by_axis.get(axis)
        return None if reference is None else reference()

    def destroy(self) -> None:
        """Destroy the groups that this object created, newest first; WORLD stays."""
        self._by_axis.clear()
        while self._created:
            group = self._created.pop()()
            if group is not None:
                destroy_within(group)
                torch_dist.destroy_process_group(group)

    def _create_all(self) -> None:
        # If one group of an axis equals a group of another axis, all its groups do, because each is
        # a stride within blocks. So all ranks either reuse a group or create one, and all create
        # them in the same order, as local synchronisation requires.
        known = {group_ranks(): get_default_group()}
        for axis in AXES:
            members = self._grid.group(axis, self._rank)
            group = known.get(members)
            if group is None or (axis == "pp" and len(members) > 1 and has_streams()):
                group = _new_group(self._grid, axis, members)
                self._created.append(ref(group))
                known.setdefault(members, group)
            self._by_axis[axis] = ref(group)


def _new_group(grid: Grid, axis: str, members: tuple[int, ...]) -> ProcessGroup:
    alone = get_backend() != "mpi"  # with MPI all ranks must create every group
    options: dict[str, Any] = {"timeout": get_timeout(), "group_desc": f"scaletorch_{axis}"}
    groups: dict[tuple[int, ...], ProcessGroup] = {
        ranks: torch_dist.new_group(list(ranks), use_local_synchronization=alone, **options)
        for ranks in ([members] if alone else grid.groups(axis))
    }
    return groups[members]


def has_streams(group: ProcessGroup | None = None) -> bool:
    """Return whether device streams run the calls of `group` (default: the default group)."""
    return get_comm_device(group).type != "cpu"


def connect(group: ProcessGroup | None, pairs: Iterable[tuple[int, int]] = ()) -> None:
    """Open a group's communicator and connect pairs of its ranks in both directions.

    All ranks call this with the same pairs of group ranks, the lower one first, and visit them in
    the same order, so it cannot deadlock. It does nothing on the CPU or for one rank.
    """
    if group is None or group.size() == 1 or not has_streams(group):
        return
    ranks, device = group_ranks(group), get_comm_device(group)
    rank = ranks.index(get_rank())
    # The first call on a communicator must not be a batch of messages between only some ranks.
    all_reduce(torch.zeros(1, device=device), group=group)
    for low, high in sorted(pairs, key=lambda pair: (pair[0] % 2, pair)):  # disjoint pairs first
        if rank in (low, high):
            peer = ranks[low + high - rank]
            sent, received = torch.zeros(1, device=device), torch.empty(1, device=device)
            exchange([(sent, peer)], [(received, peer)], group)


def connect_all(group: ProcessGroup | None) -> None:
    """Connect all pairs of a group's ranks, as all-to-all needs; all ranks call it."""
    if group is None or group.size() == 1 or not has_streams(group):
        return
    ones = [1] * group.size()
    zeros = torch.zeros(group.size(), device=get_comm_device(group))
    all_to_all_flat(zeros, ones, ones, group).wait()
