"""The backend's name in torch.distributed, and the groups it makes."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import torch.distributed as c10d

from .group import MPIGroup
from .library import check_world, load_mpi
from .progress import Engine

BACKEND = "mpi4py"  # torch keeps the name 'mpi' to itself, also where it has none

_LOWEST_TAG_BOUND = 32767  # tags that every MPI allows


def register_backend() -> None:
    """Make 'mpi4py' a backend of torch.distributed, for CPU tensors.

    Afterwards `init_process_group("mpi4py", ...)` and `new_group(backend="mpi4py")` work.
    `init_dist` calls this itself for backend 'mpi' where torch was built without MPI.

    Raises:
        StateError: `mpi4py` or an MPI library is missing.
    """
    load_mpi()
    if not hasattr(c10d.Backend, BACKEND.upper()):
        c10d.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


@functools.cache
def _engine() -> Engine:
    return Engine(load_mpi())


@functools.cache
def _base() -> Any:
    """A communicator of all ranks that carries our messages alone, beside the program's own."""
    return load_mpi().COMM_WORLD.Dup()


def _create(options: Any, backend_options: Any) -> MPIGroup:
    """Make a group; called by its members only, for the default group and for others."""
    mpi, engine = load_mpi(), _engine()
    ranks = options.global_ranks_in_group
    if not ranks:
        check_world(mpi, options.group_rank, options.group_size)
        communicator = _base().Dup()
    else:
        tag = zlib.crc32(options.group_id.encode()) % _LOWEST_TAG_BOUND
        members = _base().Get_group().Incl(ranks)
        with engine.lock:
            communicator = _base().Create_group(members, tag)
        members.Free()
    return MPIGroup(engine, communicator, options)
