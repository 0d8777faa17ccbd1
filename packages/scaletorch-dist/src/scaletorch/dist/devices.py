"""The one table of devices and their backends, and what follows from it."""

from __future__ import annotations

import functools
import glob
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup

from .errors import InvalidArgumentError, StateError
from .members import require_member

_BITS = ("band", "bor", "bxor")


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """A kind of device, its backend and how to come by them.

    Attributes:
        device: name as in `torch.device`.
        backend: name as in `torch.distributed`.
        plugin: module that brings both to torch, or None where torch has them.
        lacks: collectives and reductions that are to be done another way.
        source: where the backend comes from, for error messages.
        nodes: file pattern of the hardware's device nodes; "" for none.
    """

    device: str
    backend: str
    plugin: str | None = None
    lacks: frozenset[str] = frozenset()
    source: str = "torch's own wheels"
    nodes: str = ""


DEVICES: tuple[DeviceEntry, ...] = (
    DeviceEntry("cuda", "nccl", lacks=frozenset(_BITS), source="torch's CUDA wheels"),
    DeviceEntry(
        "npu",
        "hccl",
        "torch_npu",
        frozenset({"gather", "avg", *_BITS}),
        "Huawei Ascend: `pip install torch-npu` of torch's own version, beside CANN",
        "/dev/davinci[0-9]*",
    ),
    DeviceEntry(
        "mlu",
        "cncl",
        "torch_mlu",
        frozenset({"gather", "avg", *_BITS}),
        "Cambricon's own wheels with the Neuware SDK (developer.cambricon.com), from no registry",
        "/dev/cambricon_dev[0-9]*",
    ),
    DeviceEntry(
        "musa",
        "mccl",
        "torch_musa",
        frozenset({"gather", "avg", *_BITS}),
        "Moore Threads' own wheels with the MUSA SDK (developer.mthreads.com), from no registry",
        "/dev/mtgpu*[0-9]*",
    ),
    DeviceEntry("cpu", "gloo"),
    DeviceEntry(
        "cpu",
        "mpi",
        lacks=frozenset({"reduce_scatter", "avg", *_BITS}),
        source="a torch that was built from source against an MPI library; wheels have none",
    ),
)


def entry_of_backend(backend: str) -> DeviceEntry | None:
    """The table's entry for a backend, or None for one that it does not know."""
    return next((entry for entry in DEVICES if entry.backend == backend), None)


def _module(device: str) -> Any:
    """Torch's module of an accelerator (`torch.cuda`, `torch.npu` …)."""
    return getattr(torch, device, None)


@functools.cache
def plugin_problem(plugin: str) -> str | None:
    """Import a vendor's plugin, once; what is wrong with it, or None."""
    if importlib.util.find_spec(plugin) is None:
        return f"{plugin} is not installed"
    try:
        importlib.import_module(plugin)
    except Exception as error:  # a plugin without its driver raises whatever it likes
        return f"{plugin} is installed but does not import ({type(error).__name__}: {error})"
    return None


def device_problem(entry: DeviceEntry) -> str | None:
    """Why this machine cannot use an entry's device, or None if it can."""
    if entry.device == "cpu":
        return None
    problem = plugin_problem(entry.plugin) if entry.plugin else None
    if problem is not None:
        return f"{problem}; it comes from {entry.source}"
    module = _module(entry.device)
    if module is None or not module.is_available():
        return f"this machine has no {entry.device} device that torch can use"
    return None


def backend_problem(backend: str) -> str | None:
    """Why this machine cannot use a backend, or None if it can.

    Raises:
        InvalidArgumentError: neither the table nor torch knows this name.
    """
    entry = entry_of_backend(backend)
    if c10d.is_backend_available(backend):
        devices = c10d.Backend.backend_capability.get(backend, ["cpu"])
        if any(map(_usable, devices)):
            return None
        return f"this machine has no {' or '.join(devices)} device that torch can use"
    if entry is None:
        known = ", ".join(sorted({e.backend for e in DEVICES}))
        raise InvalidArgumentError(
            f"unknown backend {backend!r}: this package knows {known}, and any backend that was "
            "registered with torch.distributed"
        )
    problem = device_problem(entry)
    return problem or f"this torch has no {backend}; it comes from {entry.source}"


def _usable(device: str) -> bool:
    if device == "cpu":
        return True
    module = _module(device)
    return module is not None and bool(module.is_available())


def default_entry() -> DeviceEntry:
    """The entry of this machine's own device: the first accelerator there is, else the CPU."""
    return next(entry for entry in DEVICES if device_problem(entry) is None)


def default_backend() -> str:
    """The backend of this machine's own device."""
    fits = [e for e in DEVICES if device_problem(e) is None and backend_problem(e.backend) is None]
    return fits[0].backend


def require_plugin(entry: DeviceEntry) -> None:
    """Refuse to go on without a plugin where the hardware it drives is in this machine.

    Raises:
        StateError: with where the plugin comes from.
    """
    problem = plugin_problem(entry.plugin) if entry.plugin else None
    if problem is not None and entry.nodes and glob.glob(entry.nodes):
        raise StateError(
            f"this machine has {entry.device} hardware, but {problem}: backend {entry.backend!r} "
            f"needs it. It comes from {entry.source}"
        )


def backend_config(backend: str) -> str:
    """What `init_process_group` is to be told: CPU tensors keep gloo beside a device's backend.

    Example:
        >>> backend_config("nccl")
        'cpu:gloo,cuda:nccl'
    """
    if ":" in backend or backend in ("gloo", "mpi"):
        return backend
    served = [d for d in c10d.Backend.backend_capability.get(backend, ["cpu"]) if _usable(d)]
    parts = [] if "cpu" in served else ["cpu:gloo"]
    return ",".join(parts + [f"{device}:{backend}" for device in served])


def current_device() -> torch.device:
    """The device that this process computes on: its accelerator with index, else the CPU."""
    return _current(default_entry().device)


def _current(device: str) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    return torch.device(device, _module(device).current_device())


def set_device(local_rank: int) -> torch.device:
    """Choose this process's accelerator by its local rank; the CPU needs no choice.

    Where a launcher shows each process a device of its own, the only one is taken.
    """
    device = default_entry().device
    if device != "cpu":
        module = _module(device)
        module.set_device(local_rank % module.device_count())
    return _current(device)


def synchronize(device: torch.device | str | None = None) -> None:
    """Wait until the device has done all its queued work; at once on the CPU."""
    chosen = current_device() if device is None else torch.device(device)
    if chosen.type != "cpu":
        _module(chosen.type).synchronize(chosen)


@functools.lru_cache(maxsize=64)
def _comm_entry(config: str) -> tuple[str, str]:
    pairs = [part.split(":", 1) for part in config.split(",")]
    for device, backend in pairs:
        if device != "cpu" and backend != "gloo" and _usable(device):
            return device, backend
    return "cpu", dict(pairs).get("cpu", pairs[0][1])


def comm_entry(group: ProcessGroup | None = None) -> tuple[str, str]:
    """(device, backend) with which a group communicates: its accelerator's, else the CPU's."""
    return _comm_entry(c10d.get_backend_config(group))


def get_comm_device(group: ProcessGroup | None = None) -> torch.device:
    """The device on which a group's collectives want their tensors.

    Without torch.distributed it is the CPU.

    Raises:
        NotInGroupError: this rank is outside the group.
    """
    require_member(group)
    if not c10d.is_initialized():
        return torch.device("cpu")
    return _current(comm_entry(group)[0])


def backend_lacks(group: ProcessGroup | None, feature: str) -> bool:
    """Whether a group's backend is known to lack a collective or a reduction.

    Args:
        group: None for the default group.
        feature: "gather", "reduce_scatter", "avg", "band" … as in `DeviceEntry.lacks`.

    Raises:
        NotInGroupError: this rank is outside the group.
    """
    require_member(group)
    if not c10d.is_initialized():
        return False
    entry = entry_of_backend(comm_entry(group)[1])
    return entry is not None and feature in entry.lacks
