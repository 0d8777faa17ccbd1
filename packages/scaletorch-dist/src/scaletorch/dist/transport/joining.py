"""Finding out whether a group's ranks can share memory."""

from __future__ import annotations

import os
from itertools import count

import torch
from torch.distributed import ProcessGroup

from ..launchers.host import this_host
from ..wire.backend import gather_ints, route
from ..world.one_per_process import one_per_process
from .blocks import VARIABLE, allocate, attach, block_of
from .node_memory import NodeMemory

_TAG = 1 << 20  # of the messages of the first node memory in a process


def node_memory(group: ProcessGroup | None) -> NodeMemory | None:
    """Return what the ranks of a group need to share memory, or None if they cannot.

    Every rank of the group calls it. They can on one Linux host, as one user, if the group has
    gloo for CPU tensors; with `SCALETORCH_SHARED_MEMORY=0` on any rank they do not.
    """
    if group is None or group.size() == 1 or not _on_gloo(group):
        return None
    try:
        own = allocate(1, torch.int64)
        own[0] = os.getpid()
        block = block_of(own)
        allowed = os.environ.get(VARIABLE, "1") not in ("", "0")
        place = (this_host(), block.file if block is not None and allowed else -1)
    except (OSError, AttributeError):  # another system than Linux
        place = (0, -1)
    number = next(one_per_process("node_memory_numbers", count))
    rows = gather_ints((*place, os.getpid(), number), group)
    if any(file < 0 or at != rows[0][0] for at, file, _, _ in rows):
        return None
    worked = all(_readable(process, file) for _, file, process, _ in rows)
    if not all(flag for (flag,) in gather_ints((worked,), group)):
        return None
    return NodeMemory(group, [row[2] for row in rows], _TAG + 2 * max(row[3] for row in rows))


def _on_gloo(group: ProcessGroup) -> bool:
    way = route(torch.empty(0), group)
    return way.native and way.backend == "gloo"


def _readable(process: int, file: int) -> bool:
    try:
        return bool(attach(process, file, 8).view(torch.int64)[0] == process)
    except OSError:
        return False
