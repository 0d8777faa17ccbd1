"""The device on which this process computes, and the device with which a group communicates.

Each thread has a current device of its own, and a new thread has none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import InvalidArgumentError
from ..members import require_member
from .probe import default_entry, is_usable, torch_module

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
