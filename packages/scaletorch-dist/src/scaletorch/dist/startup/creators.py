"""Choose the backend of the default group, and create the group."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed as c10d

from .. import devices
from ..devices.probe import backend_config, require_plugin
from ..errors import InvalidArgumentError, StateError
from ..launchers.environment import Placement
from .rendezvous import Meeting
from .store import open_store

DEFAULT = "nccl"  # default backend of init_dist
Creator = Callable[[Placement, Meeting | str, dict[str, Any]], None]


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


def _create_with_deepspeed(
    placement: Placement, meeting: Meeting | str, options: dict[str, Any]
) -> None:
    """Create the group with torch first; DeepSpeed adopts an existing group."""
    deepspeed = _import_library("deepspeed")
    _create_with_torch(placement, meeting, options)
    deepspeed.init_distributed(dist_backend=options["backend"], auto_mpi_discovery=False)


def _create_with_colossalai(
    placement: Placement, meeting: Meeting | str, options: dict[str, Any]
) -> None:
    """Let ColossalAI create the group from torchrun's variables; it adopts no existing one."""
    colossalai = _import_library("colossalai")
    options = {name: value for name, value in options.items() if value is not None}
    timeout = options.pop("timeout", None)  # launch_from_torch has no timeout
    colossalai.launch_from_torch(**options)
    if timeout is not None:
        c10d.distributed_c10d._set_pg_timeout(timeout, c10d.group.WORLD)


def _import_library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise StateError(f"init_backend={name!r} needs {name}: pip install {name}") from error


CREATORS: dict[str, Creator] = {
    "torch": _create_with_torch,
    "deepspeed": _create_with_deepspeed,
    "colossalai": _create_with_colossalai,
}
