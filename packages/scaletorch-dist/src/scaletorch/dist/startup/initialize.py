"""Initialize and shut down torch.distributed under any launcher."""

from __future__ import annotations

import gc
import logging
import os
import sys
import weakref
from collections.abc import Mapping
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch.distributed as c10d
from torch.distributed import ProcessGroup

from .. import devices
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
from .creators import (
    DEFAULT,
    LIBRARIES,
    Notice,
    asked_to_share,
    choose_backend,
    create_group,
    rank_variables,
)
from .rendezvous import Meeting, find_meeting

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
    notice = _create_group(placement, meeting, init_backend, options)
    if notice is not None and placement.rank == 0:
        logger.log(*notice)
    _remember(ours=True)
    if placement.local_rank is None:
        devices.set_device(get_local_rank())
    wait_for_connections()


def _create_group(
    placement: Placement, meeting: Meeting | str, init_backend: str, options: dict[str, Any]
) -> Notice | None:
    """Set the environment variables and create the default group; undo them on failure."""
    place, share = (placement.rank, placement.world_size), asked_to_share(placement)
    variables, notice = rank_variables(options["backend"], *place, share=share)
    _export(placement, meeting, variables)
    try:
        if placement.local_rank is not None:
            devices.set_device(placement.local_rank)
        create_group(init_backend, placement, meeting, options)
    except BaseException:
        _restore_environment()
        raise
    return notice


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
