"""Devices and their backends: the table, probes of this machine, and the current device."""

from .current import (
    backend_problem,
    check_pair,
    comm_entry,
    current_device,
    default_backend,
    default_entry,
    get_comm_device,
    resolve_backend,
    set_device,
)
from .table import DeviceEntry, entry_of_backend, register_device

__all__ = [
    "DeviceEntry",
    "backend_problem",
    "check_pair",
    "comm_entry",
    "current_device",
    "default_backend",
    "default_entry",
    "entry_of_backend",
    "get_comm_device",
    "register_device",
    "resolve_backend",
    "set_device",
]
