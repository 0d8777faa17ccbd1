"""Ranks and nodes: local rank, local size, the node of each rank, and the identity of this host."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup

from ..devices import get_comm_device
from ..launchers.environment import find_environment, read_placement
from .info import get_rank, get_world_size, info_of, is_distributed


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
