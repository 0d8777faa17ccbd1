"""Autocast around the actions of a step."""

from __future__ import annotations

import torch
from torch import Tensor


def autocasts(device: torch.device) -> bool:
    """Tell whether autocast is on for this kind of device; false where there is none."""
    available = torch.amp.is_autocast_available(device.type)
    return available and torch.is_autocast_enabled(device.type)


def as_autocast(tensor: Tensor) -> Tensor:
    """Cast as autocast does what it gives to a linear layer."""
    if tensor.dtype == torch.float64 or not autocasts(tensor.device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
