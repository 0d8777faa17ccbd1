"""Ranks, sizes, hosts and other facts of process groups, cached in one record per group.

Every function also works without torch.distributed.

A project may vendor a copy of this library while another is installed, and both may use one process
group. Then both must, for example, number that group's messages with one counter: `one_per_process`
stores such objects in a module of torch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup

from ..devices import comm_entry, get_comm_device
from ..launchers import find_environment, launched_world_size, read_placement
from ..members import require_member

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_warned = False


@dataclass(slots=True)
class GroupInfo:
    """One group's cached facts, which live as long as the group."""

    ranks: tuple[int, ...] = ()  # global ranks in group order; empty until requested
    nodes: list[bytes] | None = None  # a digest of each rank's node, in group order
    routes: dict[str, Any] = field(default_factory=dict)  # device type → `Route` of its tensors
    ways: dict[str, Any] = field(default_factory=dict)  # device type → `Way` of its tensors


infos: WeakKeyDictionary[ProcessGroup, GroupInfo] = WeakKeyDictionary()


def info_of(group: ProcessGroup) -> GroupInfo:
    """Return the record of a group."""
    try:
        return infos[group]
    except KeyError:
        return infos.setdefault(group, GroupInfo())


def is_distributed() -> bool:
    """Return whether torch.distributed is initialized in this process."""
    return c10d.is_available() and c10d.is_initialized()


def _active(group: ProcessGroup | None) -> bool:
    """Return whether torch.distributed is initialized; raise if this rank is outside the group.

    Warn once if it is not, although a launcher started several processes.
    """
    global _warned
    if group is not None and not (isinstance(group, ProcessGroup) and group.rank() >= 0):
        require_member(group)  # raises
    if is_distributed():
        return True
    if not _warned and (size := launched_world_size()) > 1:
        _warned = True
        warnings.warn(
            f"this process was launched as one of {size}, but torch.distributed is not "
            "initialised, so that each works alone: call init_dist() first",
            RuntimeWarning,
            stacklevel=3,
        )
    return False


def expect_one_process() -> None:
    """Turn the warning off, since the program has destroyed its group and continues alone."""
    global _warned
    _warned = True


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks in a group (None: all), or 1 without torch.distributed."""
    return c10d.get_world_size(group) if _active(group) else 1


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank in a group (None: all), or 0 without torch.distributed."""
    return c10d.get_rank(group) if _active(group) else 0


def get_dist_info(group: ProcessGroup | None = None) -> tuple[int, int]:
    """Return (rank, world size), or (0, 1) without torch.distributed."""
    return get_rank(group), get_world_size(group)


def get_backend(group: ProcessGroup | None = None) -> str | None:
    """Return a group's backend ('gloo', 'nccl' …), or None without torch.distributed.

    If a group has one backend for the CPU and one for the accelerator, return the accelerator's.
    """
    return comm_entry(group)[1] if _active(group) else None


def is_main_process(group: ProcessGroup | None = None) -> bool:
    """Return whether this is rank 0 of a group (None: all); True without torch.distributed."""
    return get_rank(group) == 0


def master_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a function so that only global rank 0 runs it; other ranks return None."""

    @functools.wraps(func)
    def run_on_master(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return func(*args, **kwargs) if is_main_process() else None

    return run_on_master


def get_default_group() -> ProcessGroup | None:
    """Return the group of all ranks, or None without torch.distributed."""
    return c10d.group.WORLD if is_distributed() else None


def group_ranks(group: ProcessGroup | None = None) -> tuple[int, ...]:
    """Return a group's global ranks in order (None: all), or (0,) without torch.distributed."""
    if not _active(group):
        return (0,)
    chosen = c10d.group.WORLD if group is None else group
    info = info_of(chosen)  # type: ignore[arg-type]
    if not info.ranks:  # torch builds a new list at every call, which is slow in large worlds
        info.ranks = tuple(c10d.get_process_group_ranks(chosen))
    return info.ranks


def get_timeout(group: ProcessGroup | None = None) -> timedelta:
    """Return the timeout of a group (None: the default group).

    Pass it to `new_group`, which does not inherit it. Without torch.distributed it is torch's
    default.
    """
    if not is_distributed():
        return c10d.distributed_c10d.default_pg_timeout
    require_member(group)
    chosen = c10d.group.WORLD if group is None else group
    devices = [torch.device(comm_entry(group)[0]), *chosen._device_types]  # type: ignore[union-attr]
    for device in devices:  # some vendors' backends have no timeout, but the group's gloo has
        backend = chosen._get_backend(device)  # type: ignore[union-attr]
        with contextlib.suppress(AttributeError, RuntimeError):
            timeout: timedelta | None = backend.options._timeout
            if timeout is not None:
                return timeout
    return c10d.distributed_c10d.default_pg_timeout


def one_per_process(name: str, make: Callable[[], T]) -> T:
    """Return this process's object called `name`; the first call creates it.

    Do not call it at import, which must have no side effects. Copies may have different versions,
    so the interface of the object under one name must not change.

    Args:
        name: Name of the object.
        make: Creates the object, cheaply; called every time, but only the first object is kept.
    """
    kept: T = vars(c10d.distributed_c10d).setdefault(f"_scaletorch_{name}", make())
    return kept


def get_local_rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank among the ranks of its node, or 0 without torch.distributed.

    The launcher's value is used if there is one. Otherwise, and for an explicit group (whose ranks
    alone are then counted), the first call compares host names, so all ranks of the group must
    make it.
    """
    return _local_place(group)[0]


def get_local_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks on this node as `get_local_rank` does; 1 if not distributed."""
    return _local_place(group)[1]


def _local_place(group: ProcessGroup | None) -> tuple[int, int]:
    rank = get_rank(group)  # also raises if this rank is outside the group
    if not is_distributed():
        return 0, 1
    place = _place_by_launcher() if group is None else None
    if place is not None:
        return place
    nodes = nodes_of(group)
    neighbours = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    return neighbours.index(rank), len(neighbours)


def _place_by_launcher() -> tuple[int, int] | None:
    """Return (local rank, local size) if the environment has both and fits the default group."""
    environment = find_environment()
    if environment is None:
        return None
    placement = read_placement(environment.launcher)
    if (placement.rank, placement.world_size) != (get_rank(), get_world_size()):
        return None
    if placement.local_rank is None or placement.local_size is None:
        return None
    return placement.local_rank, placement.local_size


def nodes_of(group: ProcessGroup | None) -> list[bytes]:
    """Return a digest of each rank's node, in group order; the first call gathers them."""
    key = c10d.group.WORLD if group is None else group
    if key is None:
        return [b""]
    info = info_of(key)
    if info.nodes is None:
        device = torch.device("cpu")
        if device not in key._device_types:
            device = get_comm_device(key)
        own = torch.tensor(list(_node_digest()), dtype=torch.uint8, device=device)
        rows = [torch.empty_like(own) for _ in range(key.size())]
        c10d.all_gather(rows, own, group=key)
        info.nodes = [bytes(row.tolist()) for row in rows]
    return info.nodes


def ranks_by_node(group: ProcessGroup | None) -> list[list[int]]:
    """Return a group's ranks on each node, in the order of their first ranks."""
    found: dict[bytes, list[int]] = {}
    for rank, node in enumerate(nodes_of(group)):
        found.setdefault(node, []).append(rank)
    return list(found.values())


def _node_digest() -> bytes:
    """Return a digest that is the same on all processes of a node and differs between nodes."""
    # Two torchruns on one host count as two nodes everywhere.
    ranks = [os.environ.get(name, "") for name in ("GROUP_RANK", "SLURM_NODEID")]
    names = [str(this_host()), *ranks]
    return hashlib.blake2b("\0".join(names).encode(), digest_size=16).digest()


def wait_for_connections() -> None:
    """Wait until all ranks have connected with gloo: one that exits early would break others."""
    world = c10d.group.WORLD
    if world is not None and torch.device("cpu") in world._device_types:
        c10d.all_reduce(torch.zeros(1), group=world)


def this_host() -> int:
    """Return a number below 2**63 that is the same in all processes of one host and boot.

    Each container counts as a host.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    facts = [socket.gethostname(), boot.read_text() if boot.exists() else ""]
    for space in ("pid", "net"):  # namespaces that decide whether processes reach one another
        link = f"/proc/self/ns/{space}"
        facts.append(os.readlink(link) if os.path.exists(link) else "")
    digest = hashlib.blake2b("\0".join(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
