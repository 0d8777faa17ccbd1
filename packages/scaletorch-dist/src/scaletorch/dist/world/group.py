"""What is known of a process group on this rank: one record, filled in as it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup


@dataclass(slots=True)
class GroupInfo:
    """One group's record, which lives as long as the group.

    Attributes:
        ranks: Global ranks in group order; empty until asked for.
        nodes: A digest of each rank's node, in group order; None until asked for.
        routes: With which backend tensors travel, by the kind of their device.
        ways: How they travel then, by the kind of their device.
        memory: The way by host memory: None if there is none, missing until asked for.
        levels: The way by levels of nodes; None unless `use_hierarchy` has found one.
    """

    ranks: tuple[int, ...] = ()
    nodes: list[bytes] | None = None
    routes: dict[str, Any] = field(default_factory=dict)
    ways: dict[str, Any] = field(default_factory=dict)
    memory: Any = ...
    levels: Any = None


infos: WeakKeyDictionary[ProcessGroup, GroupInfo] = WeakKeyDictionary()


def info_of(group: ProcessGroup) -> GroupInfo:
    """Return the record of a group."""
    try:
        return infos[group]
    except KeyError:
        return infos.setdefault(group, GroupInfo())


def forget_nodes() -> None:
    """Forget which nodes ranks are on; another start may place them elsewhere."""
    for info in infos.values():
        info.nodes = None
