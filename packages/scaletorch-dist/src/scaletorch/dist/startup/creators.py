"""Choose a rank's backend and device, and create the default group.

NCCL refuses two ranks on one device of one host. It trusts the host ID that a rank sets: if the IDs
differ, messages go through sockets, and everything else works as on several devices.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from typing import Any

import torch.distributed as c10d

from .. import devices
from ..devices import DeviceEntry
from ..devices.current import backend_config, is_usable, require_plugin, torch_module
from ..errors import InvalidArgumentError, StateError
from ..launchers import Placement
from .rendezvous import Meeting, open_store

DEFAULT = "nccl"  # default backend of init_dist
LIBRARIES = ("torch", "deepspeed", "colossalai")  # that can create the group
SETTING = "SCALETORCH_SHARE_DEVICES"  # allows ranks of a launcher to share devices
_YES = frozenset(("1", "true", "yes", "on"))
_RANK = "{rank}"  # placeholder in the value of a variable that must differ from rank to rank
Notice = tuple[int, str]  # level and text of a log line, written once for all ranks of a host


def choose_backend(backend: str, *, warn: bool = True) -> str:
    """Return the configuration for the backend, or for the default with a warning if unusable."""
    pairs = devices.resolve_backend(backend)
    problem = None
    for device, name in pairs:
        entry = devices.entry_of_backend(name)
        if entry is not None:
            require_plugin(entry)
        problem = problem or devices.backend_problem(name)
        devices.check_pair(device, name)
    if problem is None:
        entries = [devices.entry_of_backend(name) for _, name in pairs]
        alone = next((entry.alone for entry in entries if entry is not None and entry.alone), "")
        if alone and len(pairs) > 1:  # a backend that must be the group's only one
            raise InvalidArgumentError(alone)
        return backend_config(",".join(f"{d}:{n}" if d else n for d, n in pairs))
    own = devices.default_backend()
    if warn:
        asked = f"{backend!r}, the default," if backend == DEFAULT else repr(backend)
        warnings.warn(
            f"backend {asked} cannot be used: {problem}. Using {own!r} instead; "
            f"backend={own!r} asks for it",
            RuntimeWarning,
            stacklevel=3,
        )
    return backend_config(own)


def check_world(config: str, rank: int, world_size: int) -> None:
    """Raise if a backend would see other ranks than the launcher, before ranks wait for others."""
    for _, name in devices.resolve_backend(config):
        entry = devices.entry_of_backend(name)
        if entry is not None and entry.check is not None:
            entry.check(rank, world_size)


def create_group(
    library: str, placement: Placement, meeting: Meeting | str, options: dict[str, Any]
) -> None:
    """Create the default group with one of `LIBRARIES`."""
    try:
        module: Any = None if library == "torch" else importlib.import_module(library)
    except ImportError as error:
        message = f"init_backend={library!r} needs {library}: pip install {library}"
        raise StateError(message) from error
    if library == "colossalai":  # it reads torchrun's variables, and adopts no existing group
        options = {name: value for name, value in options.items() if value is not None}
        timeout = options.pop("timeout", None)  # launch_from_torch has no timeout
        module.launch_from_torch(**options)
        if timeout is not None:
            c10d.distributed_c10d._set_pg_timeout(timeout, c10d.group.WORLD)
        return
    _create_with_torch(placement, meeting, options)
    if library == "deepspeed":  # it adopts an existing group
        module.init_distributed(dist_backend=options["backend"], auto_mpi_discovery=False)


def _create_with_torch(
    placement: Placement, meeting: Meeting | str, options: dict[str, Any]
) -> None:
    if options["backend"] == "mpi":  # gets rank and size from MPI itself
        c10d.init_process_group("mpi", timeout=options["timeout"])
        return
    check_world(options["backend"], placement.rank, placement.world_size)
    options = {**options, "rank": placement.rank, "world_size": placement.world_size}
    if isinstance(meeting, str):
        options["init_method"] = meeting
    else:
        options["store"] = open_store(placement, meeting, options["timeout"])
    c10d.init_process_group(**options)


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
