"""Devices and backends of this machine: whether they are usable, their names, the current device.

Each thread has a current device of its own, and a new thread has none.
"""

from __future__ import annotations

import functools
import glob
import importlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import InvalidArgumentError, ScaletorchError, StateError
from ..members import require_member
from .table import DeviceEntry, device_entries, entry_of_backend


def torch_module(device: str) -> Any:
    """Return torch's module for an accelerator (`torch.cuda`, `torch.npu` …), or None."""
    return getattr(torch, device, None)


def is_usable(device: str) -> bool:
    """Return whether torch can use a device now, without importing any plugin."""
    if device == "cpu":
        return True
    module = torch_module(device)
    return module is not None and bool(module.is_available())


@functools.cache
def plugin_problem(plugin: str) -> str | None:
    """Import a vendor's plugin, once; return the problem with it, or None."""
    try:
        importlib.import_module(plugin)
    except Exception as error:  # a plugin without its driver may raise anything
        if isinstance(error, ModuleNotFoundError) and plugin.startswith(error.name or plugin):
            return f"{plugin} is not installed"
        return f"{plugin} is installed but does not import ({type(error).__name__}: {error})"
    return None


def device_problem(entry: DeviceEntry) -> str | None:
    """Return the reason why this machine cannot use an entry's device, or None if it can."""
    problem = plugin_problem(entry.plugin) if entry.plugin else None
    if problem is not None:
        return f"{problem}; it comes from {entry.source}"
    if not is_usable(entry.device):
        return f"this machine has no {entry.device} device that torch can use"
    return None


def backend_problem(backend: str) -> str | None:
    """Return the reason why this machine cannot use a backend, or None if it can.

    Raises:
        InvalidArgumentError: Neither the table nor torch knows the name.
    """
    entry = entry_of_backend(backend)
    if entry is not None and not c10d.is_backend_available(backend):
        problem = device_problem(entry)
        try:
            if problem is None and entry.activate is not None:
                entry.activate()
        except ScaletorchError as error:
            problem = str(error)
        except Exception as error:  # another package's code may raise anything
            problem = f"backend {backend!r} does not start ({type(error).__name__}: {error})"
        if problem is not None:
            return problem
    if c10d.is_backend_available(backend):
        devices = c10d.Backend.backend_capability.get(backend, ["cpu"])
        if any(map(is_usable, devices)):
            return None
        return f"this machine has no {' or '.join(devices)} device that torch can use"
    if entry is None:
        known = ", ".join(sorted({e.backend for e in device_entries()}))
        raise InvalidArgumentError(
            f"unknown backend {backend!r}: this package knows {known}, and any backend that was "
            "registered with torch.distributed"
        )
    return f"this torch has no {backend}; it comes from {entry.source}"


def default_entry() -> DeviceEntry:
    """Return the entry of this machine's own device: the first usable accelerator, or the CPU."""
    return next(entry for entry in device_entries() if device_problem(entry) is None)


def default_backend() -> str:
    """Return the backend of the first device in the table that is usable with its backend."""
    return next(
        entry.backend
        for entry in device_entries()
        if device_problem(entry) is None and backend_problem(entry.backend) is None
    )


def require_plugin(entry: DeviceEntry) -> None:
    """Check that this machine has an entry's plugin if it has the hardware."""
    problem = plugin_problem(entry.plugin) if entry.plugin else None
    if problem is not None and entry.nodes and glob.glob(entry.nodes):
        raise StateError(
            f"this machine has {entry.device} hardware, but {problem}: backend {entry.backend!r} "
            f"needs it. It comes from {entry.source}"
        )


def resolve_backend(backend: str) -> list[tuple[str, str]]:
    """Parse a backend's name, or comma-separated `device:backend` pairs.

    Returns:
        (device, backend) pairs; the device is "" for a single name. The table's substitute
        replaces a backend that this torch was built without.

    Raises:
        InvalidArgumentError: Names and pairs are mixed, a device occurs twice, or a name is empty.

    Example:
        >>> resolve_backend("cpu:gloo,cuda:nccl")
        [('cpu', 'gloo'), ('cuda', 'nccl')]
    """
    if not isinstance(backend, str):
        raise InvalidArgumentError(f"a backend is named by a text such as 'nccl', got {backend!r}")
    entries = [entry.strip().lower() for entry in backend.split(",")]
    pairs = [(device, name) for device, _, name in (entry.rpartition(":") for entry in entries)]
    named = [device for device, _ in pairs]
    if not all(name for _, name in pairs) or (len(pairs) > 1 and not all(named)):
        raise InvalidArgumentError(
            f"cannot read backend {backend!r}: write one name, such as 'nccl', or device:backend "
            "pairs with commas between, such as 'cpu:gloo,cuda:nccl'"
        )
    if len(set(named)) < len(named):
        raise InvalidArgumentError(f"backend {backend!r} names a device twice")
    return [(device, _substitute(name)) for device, name in pairs]


def check_pair(device: str, backend: str) -> None:
    """Check that a backend serves the device paired with it.

    Raises:
        InvalidArgumentError: The backend serves other devices only.
    """
    entry = entry_of_backend(backend)
    served = c10d.Backend.backend_capability.get(backend)
    if served is None:
        served = [entry.device] if entry is not None else [device]
    if device and device not in served:
        raise InvalidArgumentError(
            f"backend {backend!r} serves {' and '.join(served)} tensors, not {device}: write "
            f"'{served[0]}:{backend}'"
        )


def _substitute(backend: str) -> str:
    entry = entry_of_backend(backend)
    if entry is not None and entry.instead and not c10d.is_backend_available(backend):
        return entry.instead
    return backend


def backend_config(backend: str) -> str:
    """Return the configuration for `init_process_group`, adding gloo if the backend lacks the CPU.

    Example:
        >>> backend_config("nccl")
        'cpu:gloo,cuda:nccl'
    """
    if ":" in backend or backend in ("gloo", "mpi"):
        return backend
    served = [d for d in c10d.Backend.backend_capability.get(backend, ["cpu"]) if is_usable(d)]
    pairs = [] if "cpu" in served else ["cpu:gloo"]
    return ",".join(pairs + [f"{device}:{backend}" for device in served])


_prepared: set[torch.device] = set()  # devices that autograd's threads have entered


def current_device() -> torch.device:
    """Return the device on which this process computes: its accelerator with index, or the CPU."""
    return current_of(default_entry().device)


def current_of(device: str) -> torch.device:
    """Return a device type with the index that is current in this process."""
    if device == "cpu":
        return torch.device("cpu")
    return torch.device(device, torch_module(device).current_device())


def set_device(local_rank: int) -> torch.device:
    """Set this process's current accelerator by its local rank, and return the device.

    A launcher may expose a single device to each process, so the index is taken modulo the number
    of devices. On the CPU nothing is set.

    Raises:
        InvalidArgumentError: `local_rank` is not an integer of at least 0.
    """
    if not isinstance(local_rank, int) or local_rank < 0:
        raise InvalidArgumentError(f"local_rank must be a number of at least 0, got {local_rank!r}")
    device = default_entry().device
    if device != "cpu":
        module = torch_module(device)
        module.set_device(local_rank % module.device_count())
    return current_of(device)


def synchronize(device: torch.device | str | None = None) -> None:
    """Wait until the device has finished its queued work; return at once on the CPU."""
    chosen = current_device() if device is None else torch.device(device)
    if chosen.type != "cpu":
        torch_module(chosen.type).synchronize(chosen)


@functools.lru_cache(maxsize=64)
def _comm_entry(config: str) -> tuple[str, str]:
    pairs = [pair.split(":", 1) for pair in config.split(",")]
    for device, backend in pairs:
        if device != "cpu" and backend != "gloo" and is_usable(device):
            return device, backend
    return "cpu", dict(pairs).get("cpu", pairs[0][1])


def comm_entry(group: ProcessGroup | None = None) -> tuple[str, str]:
    """Return a group's (device, backend): those of its accelerator, or those of the CPU."""
    return _comm_entry(c10d.get_backend_config(group))


def get_comm_device(group: ProcessGroup | None = None) -> torch.device:
    """Return the device on which a group's collectives expect their tensors.

    It is the CPU if torch.distributed is not initialized.

    Raises:
        NotInGroupError: This rank is outside the group.
    """
    require_member(group)
    if not c10d.is_initialized():
        return torch.device("cpu")
    return current_of(comm_entry(group)[0])


def prepare_backward(tensors: Iterable[Tensor]) -> None:
    """Make autograd's threads enter the devices of the tensors, once per device.

    Autograd has a thread per device. Without this, an autograd function whose backward begins with
    a matrix product could be the first to use the device in that thread.
    """
    for device in {tensor.device for tensor in tensors} - _prepared:
        if device.type not in ("cpu", "meta") and is_usable(device.type):
            with torch.inference_mode(False), torch.enable_grad():
                start = torch.zeros((), device=device, requires_grad=True)
                _Enter.apply(start).backward()  # type: ignore[no-untyped-call]
            _prepared.add(device)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor) -> Tensor:
        return data.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        device = gradients[0].device
        module = torch_module(device.type)
        if hasattr(module, "set_device"):  # torch.mps has none
            module.set_device(device)  # CUDA's libraries need a context
        return gradients[0]
