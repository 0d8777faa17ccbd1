"""What torch.distributed asks of a process group beside its collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d

from .progress import Engine

# Its stub has two signatures for most methods, of which torch.distributed uses one.
_ProcessGroup: Any = c10d.ProcessGroup


class _Options:
    """What torch.distributed and `get_timeout` ask a backend for."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self.backend = "mpi4py"


class MPIMembers(_ProcessGroup):  # type: ignore[misc]
    """The members of one communicator: a group and its only backend at once."""

    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False

    def __init__(self, engine: Engine, communicator: Any, options: Any) -> None:
        """Take what moves calls on, the communicator, and torch's options of the group."""
        super().__init__(options.group_rank, options.group_size)
        self.engine, self.communicator = engine, communicator
        self.options = _Options(options.timeout)
        self._store = options.store
        self._name, self._desc = options.group_id, "undefined"
        self._sequence = 0

    def shutdown(self) -> None:
        """Free the communicator and let go of the store; a second call does nothing."""
        self._store = None  # who keeps the group, as a device mesh does, keeps no port busy
        if self.communicator != self.engine.mpi.COMM_NULL:
            with self.engine.lock:
                self.communicator.Free()

    def abort(self) -> None:
        """Do nothing: MPI cannot take a collective back."""

    def _get_backend(self, device: torch.device) -> MPIMembers:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"backend 'mpi4py' has no communication for device {device}")
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return "mpi4py"

    name = _get_backend_name = getBackendName

    @property
    def group_name(self) -> str:
        """The name by which torch knows the group."""
        name: str = self._name
        return name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def get_group_store(self) -> Any:
        """Return the group's store."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long waits may take from now on."""
        self.options._timeout = timeout

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Each rank counts for itself."""
