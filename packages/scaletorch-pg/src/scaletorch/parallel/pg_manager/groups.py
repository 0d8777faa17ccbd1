"""The process groups of one rank: which ones it is in, how they are made, and connected.

NCCL and its like open a group's communicator at its first call, which all members must make, and
connect two ranks when they first exchange a message; both block the host. In the middle of a step
one of them may be waiting for a third rank. So groups are opened and connected before. Gloo
connects all members when a group is made.
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
from ...dist.errors import InvalidArgumentError, StateError
from .communicators import AXES
from .grid import EXPERT_AXES, Grid, axis_names

# Away from the numbers that the program's own groups get.
MARGIN = 1000


def first_unused_number() -> int:
    """Return the lowest group number that this process can offer in a new set-up."""
    return max(_next_number()[0], len(_torch_names()) + MARGIN)


@contextmanager
def numbered_from(number: int) -> Iterator[None]:
    """Let the groups made inside the block be number `number`, `number + 1` and so on.

    So they have names that are equal on all members and were never used before. torch names a group
    made by local synchronisation after its ranks and the number of groups this process holds. Two
    mistakes follow. Where a program has made a group of some ranks only, the numbers differ between
    ranks, and members of one new group wait under different names for ever. And a group made again
    after it was destroyed gets its old name, under which the store still holds the old members'
    addresses: the members connect to sockets that are gone. So a set-up agrees on a number that no
    rank has used, and this fills torch's list up to it.
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
    """Return a list of the next unused number, which vendored copies of this package share."""
    return one_per_process("group_numbers", lambda: [0])


def _torch_names() -> dict[Any, str]:
    # A torch that keeps no such list names groups in another way: nothing to mend then.
    return getattr(getattr(c10d, "_world", None), "pg_names", {})


# As in GroupSet, torch alone holds the groups.
_made: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ReferenceType[ProcessGroup]]]
_made = WeakKeyDictionary()


def groups_within(
    parent: ProcessGroup, wanted: Iterable[tuple[int, ...]], number: int
) -> dict[tuple[int, ...], ProcessGroup]:
    """Return this rank's groups among those wanted; each is made once for a parent.

    Args:
        parent: Where all its ranks are wanted, it is that group itself.
        wanted: Global ranks of each group, in one order on all ranks of the parent.
        number: From where torch's group names count, agreed by all ranks of the parent.
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
    """Destroy the groups made within another one, newest first."""
    for reference in reversed(_made.pop(parent, {}).values()):
        group = reference()
        if group is not None:
            torch_dist.destroy_process_group(group)


_AXIS_OF = {axis_names(axis): axis for axis in AXES}


def grouped_axis(axis: str) -> str:
    """Return the name in `AXES` that `axis` means, such as `"cp_dp"` for `"dp_cp"`.

    Raises:
        InvalidArgumentError: Not an axis, or one that has no process group.
    """
    if axis in AXES:
        return axis
    name = _AXIS_OF.get(axis_names(axis))
    if name is None:
        message = f"axis {axis!r} has no process group: expected one of {', '.join(AXES)}"
        raise InvalidArgumentError(message)
    return name


class GroupSet:
    """One rank's process group for every axis; equal sets of ranks share one group.

    A pipeline of all ranks has a group beside WORLD on devices with streams: a stream runs the
    calls of a group one after another, and a message that waits would hold up all of WORLD's.

    torch holds the groups; here are weak references. Whoever destroys the default group thus
    frees these too, and no thread of theirs lives on to abort the interpreter at its exit.

    A rank that is alone in a group of experts' axes, as in `"ep"` of every plain layout, makes it
    if it is asked for: it needs nobody else, and most programs have no experts.

    Args:
        grid: The layout of the world.
        rank: This process' global rank.
        first_number: From where torch's group names count, agreed by all ranks.

    Raises:
        StateError: Another rank could not make its groups; that rank raises its own error.
    """

    def __init__(self, grid: Grid, rank: int, first_number: int) -> None:
        self._grid, self._rank = grid, rank
        self._by_axis: dict[str, ReferenceType[ProcessGroup]] = {}
        self._created: list[ReferenceType[ProcessGroup]] = []
        self._alone: list[str] = []
        problem: Exception | None = None
        try:
            with numbered_from(first_number):
                self._create_all()
        except Exception as error:
            problem = error
        # Also holds everyone until all groups stand: one that went on and closed a group would
        # cut off members that are still connecting.
        failed = max(agree("the process groups", [], note=-1 if problem is None else rank))
        if failed >= 0:
            self.destroy()
            raise problem or StateError(_failure(rank, failed))
        for group in dict.fromkeys(map(self.get, self._by_axis)):
            connect(group)

    def get(self, axis: str) -> ProcessGroup | None:
        """Return the group of one of the `AXES`; None once it was destroyed."""
        if axis in self._alone:
            self._create_alone()
        reference = self._by_axis.get(axis)
        return None if reference is None else reference()

    def destroy(self) -> None:
        """Destroy the groups made here, newest first; WORLD stays."""
        self._by_axis.clear()
        self._alone.clear()
        while self._created:
            group = self._created.pop()()
            if group is not None:
                destroy_within(group)
                torch_dist.destroy_process_group(group)

    def _create_all(self) -> None:
        # Where a group of one axis is a group of another, all groups are: each is a stride within
        # blocks. So all ranks take a group or all make one, and the order below is everyone's
        # order, as local synchronisation needs it.
        made = {group_ranks(): get_default_group()}
        for axis in AXES:
            members = self._grid.group(axis, self._rank)
            group = made.get(members)
            if axis == "pp" and group is not None and len(members) > 1 and has_streams():
                group = _new_group(self._grid, axis, members)
                self._created.append(ref(group))
            if group is None and axis in EXPERT_AXES and len(members) == 1 and not _is_mpi():
                self._alone.append(axis)
                continue
            if group is None:
                group = made[members] = _new_group(self._grid, axis, members)
                self._created.append(ref(group))
            self._by_axis[axis] = ref(group)

    def _create_alone(self) -> None:
        """Make the group of this rank alone, for all axes that want it."""
        with numbered_from(first_unused_number()):
            group = _new_group(self._grid, self._alone[0], (self._rank,))
        self._created.append(ref(group))
        self._by_axis.update(dict.fromkeys(self._alone, ref(group)))
        self._alone.clear()


def _failure(rank: int, failed: int) -> str:
    return (
        f"rank {rank}: the process groups cannot be used, as rank {failed} failed to make its own; "
        "see that rank's error"
    )


def _is_mpi() -> bool:
    """Return whether all ranks must make each group together."""
    return get_backend() == "mpi"


def _new_group(grid: Grid, axis: str, members: tuple[int, ...]) -> ProcessGroup:
    options: dict[str, Any] = {"timeout": get_timeout(), "group_desc": f"scaletorch_{axis}"}
    group: ProcessGroup
    if not _is_mpi():
        group = torch_dist.new_group(list(members), use_local_synchronization=True, **options)
        return group
    for ranks in grid.groups(axis):  # MPI needs all ranks to make a group of some
        made = torch_dist.new_group(list(ranks), **options)
        if ranks == members:
            group = made
    return group


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
