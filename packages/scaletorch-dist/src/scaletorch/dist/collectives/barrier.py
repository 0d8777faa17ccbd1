"""The barrier."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from ..devices import get_comm_device
from ..wire.backend import raw_barrier
from ..wire.checks import begin


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait until every rank of a group has called this; return at once if it has one rank.

    Raises:
        NotInGroupError: This rank is outside the group.
    """
    members = begin(group, "barrier")
    if members is None:
        return
    device = get_comm_device(members)
    if device.type == "cpu":
        raw_barrier(members)
    else:  # without device_ids the backend guesses a device from the rank, and warns
        raw_barrier(members, device_ids=[device.index])
