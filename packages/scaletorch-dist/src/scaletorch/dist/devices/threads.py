"""The current device of a thread: each thread has its own, and a new thread has none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .probe import is_usable, torch_module

_prepared: set[torch.device] = set()


def enter_device(device: torch.device) -> None:
    """Make a device the current one of this thread, even if it is the default device.

    CUDA's libraries need a context in the thread, and a default device does not create one.
    """
    module = torch_module(device.type)
    if device.type != "cpu" and is_usable(device.type) and hasattr(module, "set_device"):
        module.set_device(device)


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
        enter_device(gradients[0].device)
        return gradients[0]
