"""Devices and their backends: the table, probes of this machine, and the chosen device."""

from .chosen import (
    comm_entry,
    current_device,
    get_comm_device,
    set_device,
    synchronize,
)
from .probe import (
    backend_config,
    backend_problem,
    check_pair,
    default_backend,
    default_entry,
    device_problem,
    plugin_problem,
    require_plugin,
    resolve_backend,
)
from .table import (
    DEVICES,
    FEATURES,
    REDUCED,
    DeviceEntry,
    device_entries,
    entry_of_backend,
    register_device,
)

__all__ = [
    "DEVICES",
    "FEATURES",
    "REDUCED",
    "DeviceEntry",
    "backend_config",
    "backend_problem",
    "check_pair",
    "comm_entry",
    "current_device",
    "default_backend",
    "default_entry",
    "device_entries",
    "device_problem",
    "entry_of_backend",
    "get_comm_device",
    "plugin_problem",
    "register_device",
    "require_plugin",
    "resolve_backend",
    "set_device",
    "synchronize",
]
