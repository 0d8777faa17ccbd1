"""Several ranks on one device, which accelerator backends refuse by default.

NCCL refuses two ranks on one device of one host. It trusts the host ID that a rank sets: if the IDs
differ, messages go through sockets, and everything else works as on several devices.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from typing import NamedTuple

from .. import devices
from ..devices import DeviceEntry
from ..devices.probe import is_usable, torch_module
from ..errors import StateError
from ..launchers.environment import Placement
from ..launchers.host import this_host
from ..world.hosts import DIGEST, gather_digests
from .creators import check_world, choose_backend

SETTING = "SCALETORCH_SHARE_DEVICES"  # allows ranks of a launcher to share devices

_YES = frozenset(("1", "true", "yes", "on"))
_RANK = "{rank}"  # placeholder in the value of a variable that must differ from rank to rank


class Notice(NamedTuple):
    """A log line, written once for all ranks of a host."""

    level: int
    text: str


def crowded(config: str, ranks: int) -> DeviceEntry | None:
    """Return the entry that takes one rank per device and has too few devices here, or None.

    Args:
        config: Backends of the default group, such as 'cpu:gloo,cuda:nccl'.
        ranks: Number of ranks on this host.
    """
    entry = _one_rank_a_device(config)
    return entry if entry is not None and _count(entry) < ranks else None


def _one_rank_a_device(config: str) -> DeviceEntry | None:
    named = (devices.entry_of_backend(name) for _, name in devices.resolve_backend(config))
    known = (entry for entry in named if entry is not None and entry.sharing is not None)
    return next((entry for entry in known if is_usable(entry.device)), None)


def _count(entry: DeviceEntry) -> int:
    return int(torch_module(entry.device).device_count())


def _devices(entry: DeviceEntry) -> str:
    count = _count(entry)
    return f"{count} {entry.device} device{'s' * (count != 1)}"


def asked_to_share(placement: Placement) -> bool:
    """Return whether `SETTING` is on and all ranks are on one host, so that they share devices."""
    one_host = placement.local_size in (None, placement.world_size)
    return one_host and os.environ.get(SETTING, "").strip().lower() in _YES


def rank_variables(
    config: str, rank: int, ranks: int, *, share: bool
) -> tuple[dict[str, str], Notice | None]:
    """Return the unset environment variables that a rank needs before it uses its device.

    A device that is already in use would no longer read its `variables`, so they are left out.

    Args:
        config: Backends of the default group, such as 'cpu:gloo,cuda:nccl'.
        rank: This rank in the group.
        ranks: Size of the group; a single rank waits for no other and needs no `variables`.
        share: Share devices if there are fewer than ranks; requires all ranks on this host.

    Returns:
        The variables, and a log notice about sharing, or None.
    """
    wanted: dict[str, str] = {}
    notice = None
    for _, name in devices.resolve_backend(config) if ranks > 1 else ():
        entry = devices.entry_of_backend(name)
        if entry and entry.variables and not torch_module(entry.device).is_initialized():
            wanted.update(entry.variables)
    entry = crowded(config, ranks) if share else None
    if entry is not None and entry.sharing:
        wanted |= {name: value.replace(_RANK, str(rank)) for name, value in entry.sharing}
        notice = Notice(
            logging.WARNING,
            f"{ranks} ranks share {_devices(entry)} with backend {entry.backend!r}, by sockets of "
            "this host: good for tests, and slow",
        )
    return {name: value for name, value in wanted.items() if name not in os.environ}, notice


def prepare_local_rank(
    backend: str | None, rank: int, ranks: int, *, warn: bool = True
) -> tuple[str, Notice | None]:
    """Choose the backend and the device of a rank in a group whose ranks are all on this host.

    Args:
        backend: None takes the accelerator's backend if each rank can have a device, else gloo.
        rank: This rank in the group.
        ranks: Size of the group.
        warn: Warn if `backend` cannot be used and another one replaces it.

    Returns:
        The configuration for `init_process_group`, and a log notice, or None.
    """
    chosen = None
    if backend is None:
        backend, chosen = _own_backend(ranks)
        if chosen is None:
            return backend, None
    config = choose_backend(backend, warn=warn and rank == 0)
    check_world(config, rank, ranks)
    variables, shared = rank_variables(config, rank, ranks, share=True)
    os.environ.update(variables)
    devices.set_device(rank)
    return config, shared or chosen


def _own_backend(ranks: int) -> tuple[str, Notice | None]:
    entry = devices.default_entry()
    if entry.device == "cpu":
        return "gloo", None
    own = devices.default_backend()
    numbers = f"{ranks} ranks, {_devices(entry)}"
    if _count(entry) >= ranks:
        return own, Notice(logging.INFO, f"{numbers}: backend {own!r}")
    way = f"; backend={own!r} lets ranks share devices" if entry.sharing else ""
    text = f"{numbers}: backend 'gloo', by way of the host's memory{way}"
    return "gloo", Notice(logging.WARNING, text)


def refuse_shared_devices(config: str, local_size: int) -> None:
    """Raise on every rank if two ranks are on one device and the backend would refuse that.

    If one rank calls it, all ranks must.

    Args:
        config: Backends of the default group, which serves CPU tensors too.
        local_size: Number of ranks on this host.

    Raises:
        StateError: Two ranks share a device; the message gives the numbers and the remedy.
    """
    entry = _one_rank_a_device(config)
    found = gather_digests(os.urandom(DIGEST) if entry is None else _place(entry))
    place, count = Counter(found).most_common(1)[0]
    if entry is None or count == 1:
        return
    ranks = [str(rank) for rank, each in enumerate(found) if each == place]
    raise StateError(
        f"ranks {', '.join(ranks[:-1])} and {ranks[-1]} are on one {entry.device} device, but "
        f"backend {entry.backend!r} takes one rank a device: this host has {local_size} ranks and "
        f"{_devices(entry)}. {_way_out(entry)}"
    )


def _place(entry: DeviceEntry) -> bytes:
    """Return a digest that is equal on two ranks if their backend sees them on one device."""
    module = torch_module(entry.device)
    properties = module.get_device_properties(module.current_device())
    if getattr(properties, "uuid", None) is None:  # some vendors give no uuid
        return os.urandom(DIGEST)
    said = [os.environ[name] for name in _host_variables(entry) if name in os.environ]
    parts = [*(said or [str(this_host())]), str(properties.uuid)]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=DIGEST).digest()


def _host_variables(entry: DeviceEntry) -> list[str]:
    return [name for name, value in entry.sharing or () if _RANK in value]


def _way_out(entry: DeviceEntry) -> str:
    given = [name for name in _host_variables(entry) if name in os.environ]
    if given:
        return f"{given[0]} must differ from rank to rank, and is {os.environ[given[0]]!r}"
    fewer = "Start fewer ranks"
    if entry.sharing:
        return f"{fewer}; or, for tests on one host, set {SETTING}=1, and they share devices"
    return f"{fewer}, or take backend 'gloo'"
