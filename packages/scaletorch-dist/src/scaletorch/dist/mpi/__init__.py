"""The c10d backend 'mpi4py': MPI for torch's wheels, which are built without it."""

from .library import load_mpi
from .register import BACKEND, register_backend

__all__ = ["BACKEND", "load_mpi", "register_backend"]
