"""The device of a thread: each thread has a current one of its own, and a new thread has none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .probe import is_usable, torch_module

_prepared: set[torch.device] = set()


def enter_device(device: torch.device) -> None:
    """Make a device the current one of this thread, even if it is the default one.

    CUDA's libraries look for the thread's context, which a default device does not make.
    """
    module = torch_module(device.type)
    if device.type != "cpu" and is_usable(device.type) and hasattr(module, "set_device"):
        module.set_device(device)


def prepare_backward(tensors: Iterable[Tensor]) -> None:
    """Let autograd's threads enter the devices of some tensors, once for each device.

    Autograd has a thread for each device. An autograd function whose backward begins with a
    matrix product is otherwise the first there to use the device.
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
