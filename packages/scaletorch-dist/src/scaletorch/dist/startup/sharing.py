"""Several ranks on one device, which accelerator backends refuse by default.

NCCL refuses two ranks on one device of one host. It trusts the host ID that a rank sets: if the IDs
differ, messages go through sockets, and everything else works as on several devices.
"""

from __future__ import annotations

import logging
import os

from .. import devices
from ..devices import DeviceEntry
from ..devices.probe import is_usable, torch_module
from ..errors import StateError
from ..launchers.environment import Placement
from .creators import check_world, choose_backend

SETTING = "SCALETORCH_SHARE_DEVICES"  # allows ranks of a launcher to share devices

_YES = frozenset(("1", "true", "yes", "on"))
_RANK = "{rank}"  # placeholder in the value of a variable that must differ from rank to rank

Notice = tuple[int, str]  # level and text of a log line, written once for all ranks of a host


def asked_to_share(placement: Placement) -> bool:
    """Return whether `SETTING` is on and all ranks are on one host, so that they share devices."""
    one_host = placement.local_size in (None, placement.world_size)
    return one_host and os.environ.get(SETTING, "").strip().lower() in _YES


def rank_variables(
    config: str, rank: int, ranks: int, *, share: bool
) -> tuple[dict[str, str], Notice | None]:
    """Return the unset variables that a rank needs before it uses its device; one rank has none."""
    wanted: dict[str, str] = {}
    notice = None
    for _, name in devices.resolve_backend(config) if ranks > 1 else ():
        entry = devices.entry_of_backend(name)
        if entry is None or entry.device == "cpu" or not is_usable(entry.device):
            continue
        # A device in use would no longer read its variables.
        if entry.variables and not torch_module(entry.device).is_initialized():
            wanted.update(entry.variables)
        if share and entry.sharing is not None and _count(entry) < ranks:
            if not entry.sharing:
                raise StateError(
                    f"backend {entry.backend!r} takes one rank per device: {ranks} ranks, "
                    f"{_devices(entry)}. Start fewer ranks, or take backend 'gloo'"
                )
            wanted |= {name: value.replace(_RANK, str(rank)) for name, value in entry.sharing}
            text = (
                f"{ranks} ranks share {_devices(entry)} with backend {entry.backend!r}, by sockets "
                "of this host: good for tests, and slow"
            )
            notice = logging.WARNING, text
    return {name: value for name, value in wanted.items() if name not in os.environ}, notice


def _count(entry: DeviceEntry) -> int:
    return int(torch_module(entry.device).device_count())


def _devices(entry: DeviceEntry) -> str:
    count = _count(entry)
    return f"{count} {entry.device} device{'s' * (count != 1)}"


def prepare_local_rank(
    backend: str | None, rank: int, ranks: int, *, warn: bool = True
) -> tuple[str, Notice | None]:
    """Choose the backend and the device of a rank in a group whose ranks are all on this host."""
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
    """Return the accelerator's backend if each rank can have a device, else gloo."""
    entry = devices.default_entry()
    if entry.device == "cpu":
        return "gloo", None
    own = devices.default_backend()
    numbers = f"{ranks} ranks, {_devices(entry)}"
    if _count(entry) >= ranks:
        return own, (logging.INFO, f"{numbers}: backend {own!r}")
    hint = f"; backend={own!r} lets ranks share devices" if entry.sharing else ""
    text = f"{numbers}: backend 'gloo', through the host's memory{hint}"
    return "gloo", (logging.WARNING, text)
