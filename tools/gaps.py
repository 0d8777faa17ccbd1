"""Differences between tensors and those of one process."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from scaletorch.dist.testing import relative_error


def gap(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative error of all tensors, and the name of its tensor.

    An error is relative to the tensor's own largest value, or to 1e-4 of the largest value of all
    if that is more: some gradients are only rounding errors.
    """
    floor = 1e-4 * max((t.abs().max() for t in expected.values() if _real(t)), default=0.0)
    worst = (0.0, "")
    for name, tensor in expected.items():
        if not _real(tensor):
            continue
        scale = torch.as_tensor(max(tensor.abs().max(), floor))
        given = found.get(name)
        if given is None or given.shape != tensor.shape:
            error = float("inf") if tensor.abs().max() > floor * 1e-3 else 0.0
        else:
            error = relative_error(given, tensor, scale=scale)
        worst = max(worst, (error, name))
    return worst


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0
