"""The device that this process computes on."""

from __future__ import annotations

import torch

from ..errors import InvalidArgumentError
from .probe import default_entry, torch_module


def current_device() -> torch.device:
    """The device that this process computes on: its accelerator with index, else the CPU."""
    return current_of(default_entry().device)


def current_of(device: str) -> torch.device:
    """A kind of device with the index that is chosen in this process."""
    if device == "cpu":
        return torch.device("cpu")
    return torch.device(device, torch_module(device).current_device())


def set_device(local_rank: int) -> torch.device:
    """Choose this process's accelerator by its local rank; the CPU needs no choice.

    Where a launcher shows each process a device of its own, the only one is taken.

    Raises:
        InvalidArgumentError: `local_rank` is no number of at least 0.
    """
    if not isinstance(local_rank, int) or local_rank < 0:
        message = f"local_rank must be a number of at least 0, got {local_rank!r}"
        raise InvalidArgumentError(message)
    device = default_entry().device
    if device != "cpu":
        module = torch_module(device)
        module.set_device(local_rank % module.device_count())
    return current_of(device)


def synchronize(device: torch.device | str | None = None) -> None:
    """Wait until the device has done all its queued work; at once on the CPU."""
    chosen = current_device() if device is None else torch.device(device)
    if chosen.type != "cpu":
        torch_module(chosen.type).synchronize(chosen)
