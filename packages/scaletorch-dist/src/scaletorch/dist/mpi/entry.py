"""The device table's entry for MPI over mpi4py, loaded by name like other packages' entries."""

from __future__ import annotations

from ..devices import DeviceEntry


def _register() -> None:
    from .register import register_backend  # imported late: seldom needed

    register_backend()


def _check(rank: int, world_size: int) -> None:
    from .register import check_world, load_mpi

    check_world(load_mpi(), rank, world_size)


ENTRY = DeviceEntry(
    "cpu",
    "mpi4py",
    "mpi4py",
    source="`pip install scaletorch-dist[mpi]`, beside Open MPI or MPICH",
    activate=_register,
    alone="MPI over mpi4py serves a whole group and cannot stand beside another backend: use "
    "'mpi' alone (tensors of devices are copied through the CPU), or a torch that was built with "
    "MPI",
    check=_check,
)
