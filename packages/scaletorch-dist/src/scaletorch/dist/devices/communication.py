"""With what a group communicates, and what that lacks."""

from __future__ import annotations

import functools

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup

from ..members import require_member
from .compute import current_of
from .probe import is_usable
from .table import entry_of_backend


@functools.lru_cache(maxsize=64)
def _comm_entry(config: str) -> tuple[str, str]:
    pairs = [part.split(":", 1) for part in config.split(",")]
    for device, backend in pairs:
        if device != "cpu" and backend != "gloo" and is_usable(device):
            return device, backend
    return "cpu", dict(pairs).get("cpu", pairs[0][1])


def comm_entry(group: ProcessGroup | None = None) -> tuple[str, str]:
    """(device, backend) with which a group communicates: its accelerator's, else the CPU's."""
    return _comm_entry(c10d.get_backend_config(group))


def get_comm_device(group: ProcessGroup | None = None) -> torch.device:
    """The device on which a group's collectives want their tensors.

    Without torch.distributed it is the CPU.

    Raises:
        NotInGroupError: This rank is outside the group.
    """
    require_member(group)
    if not c10d.is_initialized():
        return torch.device("cpu")
    return current_of(comm_entry(group)[0])


def backend_lacks(group: ProcessGroup | None, feature: str) -> bool:
    """Return whether a group's backend is known to lack a collective or a reduction.

    Args:
        group: None for the default group.
        feature: "gather", "reduce_scatter", "avg", "band" … as in `DeviceEntry.lacks`.

    Raises:
        NotInGroupError: This rank is outside the group.
    """
    require_member(group)
    if not c10d.is_initialized():
        return False
    entry = entry_of_backend(comm_entry(group)[1])
    return entry is not None and feature in entry.lacks
