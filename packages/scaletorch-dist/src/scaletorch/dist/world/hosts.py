"""Ranks of this node: local rank and size."""

from __future__ import annotations

import hashlib
import os

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup

from ..devices import get_comm_device
from ..launchers.environment import find_environment, read_placement
from ..launchers.host import this_host
from .info import get_rank, get_world_size, info_of, is_distributed

DIGEST = 16  # bytes that stand for a node


def get_local_rank(group: ProcessGroup | None = None) -> int:
    """This process's rank among those of its node; 0 without torch.distributed.

    It is the launcher's where that says it. Otherwise, and for an explicit group (then among
    that group's ranks), the first call compares host names, so that all its ranks must make it.
    """
    return _local_place(group)[0]


def get_local_size(group: ProcessGroup | None = None) -> int:
    """Number of ranks on this node, found as `get_local_rank` does; 1 without torch.distributed."""
    return _local_place(group)[1]


def _local_place(group: ProcessGroup | None) -> tuple[int, int]:
    rank = get_rank(group)  # also refuses outsiders
    if not is_distributed():
        return 0, 1
    place = _place_by_launcher() if group is None else None
    if place is not None:
        return place
    nodes = nodes_of(group)
    neighbours = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    return neighbours.index(rank), len(neighbours)


def _place_by_launcher() -> tuple[int, int] | None:
    """(local rank, local size) if the environment has both and is about this very group."""
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
    """A digest of each rank's node, in group order; gathered on the first call."""
    key = c10d.group.WORLD if group is None else group
    if key is None:
        return [b""]
    info = info_of(key)
    if info.nodes is None:
        info.nodes = gather_digests(_node_digest(), key)
    return info.nodes


def gather_digests(own: bytes, group: ProcessGroup | None = None) -> list[bytes]:
    """Gather as many bytes from each rank of a group, in group order."""
    device = torch.device("cpu")
    members = c10d.group.WORLD if group is None else group
    if members is None or device not in members._device_types:
        device = get_comm_device(group)
    sent = torch.tensor(list(own), dtype=torch.uint8, device=device)
    rows = [torch.empty_like(sent) for _ in range(c10d.get_world_size(group))]
    c10d.all_gather(rows, sent, group=group)
    return [bytes(row.tolist()) for row in rows]


def ranks_by_node(group: ProcessGroup | None) -> list[list[int]]:
    """Return a group's ranks on each node, in the order of their first ranks."""
    found: dict[bytes, list[int]] = {}
    for rank, node in enumerate(nodes_of(group)):
        found.setdefault(node, []).append(rank)
    return list(found.values())


def _node_digest() -> bytes:
    """The same on all processes of a node and on no other node."""
    # Two torchruns on one host are two nodes to everyone else.
    ranks = [os.environ.get(name, "") for name in ("GROUP_RANK", "SLURM_NODEID")]
    parts = [str(this_host()), *ranks]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=DIGEST).digest()


def wait_for_connections(flag: bool = False) -> bool:
    """Wait until every rank has connected the groups that were just made.

    Returns whether `flag` is set on any rank; never if the default group has no CPU tensors.

    Gloo connects when a group is made, and does not wait for the others: a rank that soon leaves
    would break off the connecting of slower ones.
    """
    world = c10d.group.WORLD
    if world is None or torch.device("cpu") not in world._device_types:
        return False
    flags = torch.tensor([float(flag)])
    c10d.all_reduce(flags, group=world)
    return bool(flags)
