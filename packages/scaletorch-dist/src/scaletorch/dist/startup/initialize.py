"""Initialize and shut down torch.distributed under any launcher: backend, device, default group.

NCCL refuses two ranks on one device of one host. It trusts the host ID that a rank sets: if the IDs
differ, messages go through sockets, and everything else works as on several devices.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Mapping
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch.distributed as c10d
from torch.distributed import ProcessGroup

from .. import devices
from ..devices import DeviceEntry
from ..devices.current import backend_config, is_usable, require_plugin, torch_module
from ..errors import InvalidArgumentError, StateError
from ..launchers import (
    LAUNCHERS,
    Placement,
    gloo_interface,
    infer_launcher,
    read_placement,
    refuse_batch_script_of_many,
    remember_launcher,
)
from ..world.info import expect_one_process, get_local_rank, wait_for_connections
from .rendezvous import Meeting, find_meeting, open_store

DEFAULT = "nccl"  # default backend of init_dist
LIBRARIES = ("torch", "deepspeed", "colossalai")  # that can create the group
SETTING = "SCALETORCH_SHARE_DEVICES"  # allows ranks of a launcher to share devices
_YES = frozenset(("1", "true", "yes", "on"))
_RANK = "{rank}"  # placeholder in the value of a variable that must differ from rank to rank

logger = logging.getLogger(__package__)

_group: weakref.ref[ProcessGroup] | None = None  # the default group that init_dist made or found
_ours = False  # whether init_dist made it
_replaced: dict[str, str | None] = {}  # previous values of the variables that init_dist set


def init_dist(
    launcher: str | None = None,
    backend: str = DEFAULT,
    *,
    port: int | None = None,
    timeout: timedelta | float | None = None,
    init_method: str | None = None,
    init_backend: str = "torch",
    **kwargs: Any,
) -> None:
    """Initialize torch.distributed: find this rank, choose its device, create the default group.

    If this machine cannot use the backend, that of the machine's own device replaces it with one
    warning; CPU tensors always keep gloo. Without a launcher, named or found, the process is alone
    and nothing is initialized. An existing default group is adopted.

    Args:
        launcher: 'pytorch' (torchrun, or its variables set by hand), 'slurm' (srun), 'mpi'
            (mpirun of Open MPI or MPICH), or "none"; None infers it from the environment.
        backend: 'nccl', 'gloo', 'hccl', 'cncl', 'mccl', 'mpi', or 'cpu:gloo,cuda:nccl' and so on.
        port: Port of rank 0's store instead of `MASTER_PORT`; has no effect on torchrun's store.
        timeout: For collectives of this group and of every group created later; in seconds, or a
            timedelta.
        init_method: A URL for `init_process_group`, instead of the environment's address.
        init_backend: The library that creates the group: 'torch', 'deepspeed' or 'colossalai'.
        kwargs: Passed to `init_process_group` (or the library's equivalent).

    Raises:
        InvalidArgumentError: The launcher, backend or init_backend is unknown.
        StateError: A variable is missing, this was called before, a Slurm job of several tasks runs
            this without srun, or a vendor's hardware lacks its plugin.

    Example:
        >>> init_dist("pytorch", backend="nccl", timeout=600)
    """
    _check_choice("launcher", launcher, (*LAUNCHERS, "none", None))
    _check_choice("init_backend", init_backend, LIBRARIES)
    options = {"timeout": _timedelta(timeout), **kwargs}
    if c10d.is_initialized():
        if _group is not None and _group() is c10d.group.WORLD:
            raise StateError(
                "this process has called init_dist() before: call it once, or cleanup_dist() first"
            )
        _remember(ours=False)
        return
    if (launcher := launcher or infer_launcher()) == "none":
        refuse_batch_script_of_many()
        return
    placement = read_placement(launcher)
    meeting = find_meeting(placement, port, init_method)
    warns = 0 in (placement.rank, placement.local_rank)  # one rank per machine
    options["backend"] = choose_backend(backend, warn=warns)
    _create_group(placement, meeting, init_backend, options)
    _remember(ours=True)
    if placement.local_rank is None:
        devices.set_device(get_local_rank())
    wait_for_connections()


def _create_group(
    placement: Placement, meeting: Meeting | str, init_backend: str, options: dict[str, Any]
) -> None:
    """Set the environment variables and create the default group; undo them on failure."""
    rank, ranks = placement.rank, placement.world_size
    share = os.environ.get(SETTING, "").strip().lower() in _YES
    share = share and placement.local_size in (None, ranks)  # all on one host
    variables = rank_variables(options["backend"], rank, ranks, share=share)
    _export(placement, meeting, variables)
    try:
        if placement.local_rank is not None:
            devices.set_device(placement.local_rank)
        create_group(init_backend, placement, meeting, options)
    except BaseException:
        _restore_environment()
        raise


def cleanup_dist() -> None:
    """Destroy the default group that `init_dist` created, and restore the environment.

    Safe to call twice, or if nothing was initialized. A group that `init_dist` adopted stays.
    Release models first, for example by returning from the training function: a group that a model
    holds is not shut down, and can hang below a live DistributedDataParallel.
    """
    global _group, _ours
    ours = _ours and _group is not None and _group() is c10d.group.WORLD
    if ours and c10d.is_initialized():
        _release_references()
        c10d.destroy_process_group()
    if _group is not None:
        expect_one_process()
    _group, _ours = None, False
    _restore_environment()


def _release_references() -> None:
    """Release references to groups held by garbage and by default arguments of torch's functions.

    A group that is still referenced is not shut down: its threads stay alive and abort the process
    if one of them frees a tensor at interpreter exit (pytorch/pytorch#190489).
    """
    gc.collect()
    module = sys.modules.get("torch.distributed.nn.functional")
    for each in vars(module).values() if module is not None else ():
        if isinstance(each, FunctionType) and each.__defaults__:
            kept = (None if value is c10d.group.WORLD else value for value in each.__defaults__)
            each.__defaults__ = tuple(kept)  # torch takes None as the default group


def _check_choice(name: str, value: str | None, valid: tuple[str | None, ...]) -> None:
    if value not in valid:
        choices = ", ".join(map(repr, valid))
        raise InvalidArgumentError(f"unknown {name} {value!r}: the valid ones are {choices}")


def _timedelta(timeout: timedelta | float | None) -> timedelta | None:
    if timeout is None or isinstance(timeout, timedelta):
        return timeout
    if not isinstance(timeout, int | float) or timeout <= 0:
        raise InvalidArgumentError(
            f"timeout must be a positive number of seconds or a timedelta, not {timeout!r}"
        )
    return timedelta(seconds=timeout)


def _remember(ours: bool) -> None:
    global _group, _ours
    world = c10d.group.WORLD
    _group = None if world is None else weakref.ref(world)
    _ours = ours


def _export(placement: Placement, meeting: Meeting | str, more: Mapping[str, str]) -> None:
    """Set `more` and torchrun's variables, which other libraries may read later."""
    values: dict[str, object] = {
        **more,
        "RANK": placement.rank,
        "WORLD_SIZE": placement.world_size,
        "LOCAL_RANK": placement.local_rank,
        "LOCAL_WORLD_SIZE": placement.local_size,
    }
    address = os.environ.get("MASTER_ADDR", "")
    if not isinstance(meeting, str):
        address = meeting.address
        values |= {"MASTER_ADDR": meeting.address, "MASTER_PORT": meeting.port}
    if address and "GLOO_SOCKET_IFNAME" not in os.environ:
        one_machine = placement.local_size == placement.world_size
        values["GLOO_SOCKET_IFNAME"] = gloo_interface(address, one_machine)
    remember_launcher(placement.launcher)
    for name, value in values.items():
        if value is not None and os.environ.get(name) != str(value):
            _replaced[name] = os.environ.get(name)
            os.environ[name] = str(value)


def _restore_environment() -> None:
    for name, value in _replaced.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _replaced.clear()
    remember_launcher(None)


def choose_backend(backend: str, *, warn: bool = True) -> str:
    """Return the configuration for the backend, or for the default with a warning if unusable."""
    pairs = devices.resolve_backend(backend)
    for entry in _entries(backend):
        require_plugin(entry)
    problem = next(filter(None, (devices.backend_problem(name) for _, name in pairs)), None)
    for device, name in pairs:
        devices.check_pair(device, name)
    if problem is None:
        alone = next((entry.alone for entry in _entries(backend) if entry.alone), "")
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
    for entry in _entries(config):
        if entry.check is not None:
            entry.check(rank, world_size)


def _entries(config: str) -> list[DeviceEntry]:
    """Return the table's entries of the backends in a configuration."""
    found = [devices.entry_of_backend(name) for _, name in devices.resolve_backend(config)]
    return [entry for entry in found if entry is not None]


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


def rank_variables(config: str, rank: int, ranks: int, *, share: bool) -> dict[str, str]:
    """Return the unset variables that a rank needs before it uses its device; one rank has none."""
    wanted: dict[str, str] = {}
    for entry in _entries(config) if ranks > 1 else ():
        if entry.device == "cpu" or not is_usable(entry.device):
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
            if rank == 0:
                text = "%d ranks share %s with backend %r, by sockets of this host: slow, for tests"
                logger.warning(text, ranks, _devices(entry), entry.backend)
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _count(entry: DeviceEntry) -> int:
    return int(torch_module(entry.device).device_count())


def _devices(entry: DeviceEntry) -> str:
    count = _count(entry)
    return f"{count} {entry.device} device{'s' * (count != 1)}"


def prepare_local_rank(backend: str | None, rank: int, ranks: int, *, warn: bool = True) -> str:
    """Choose the backend and the device of a rank in a group whose ranks are all on this host."""
    config = choose_backend(backend or _own_backend(rank, ranks), warn=warn and rank == 0)
    check_world(config, rank, ranks)
    os.environ.update(rank_variables(config, rank, ranks, share=True))
    devices.set_device(rank)
    return config


def _own_backend(rank: int, ranks: int) -> str:
    """Return the accelerator's backend if each rank can have a device, else gloo."""
    entry = devices.default_entry()
    if entry.device == "cpu":
        return "gloo"
    own = devices.default_backend()
    if _count(entry) >= ranks:
        return own
    if rank == 0:
        hint = f"; backend={own!r} lets ranks share devices" if entry.sharing else ""
        text = "%d ranks, %s: backend 'gloo', through the host's memory%s"
        logger.warning(text, ranks, _devices(entry), hint)
    return "gloo"
