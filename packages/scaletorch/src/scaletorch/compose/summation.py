"""Bounds for the rounding of sums, from the number of additions and the size of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

ROOM = 4.0  # epsilon x root of additions that are allowed; 0.1 to 0.3 are seen


def chain_length(model: nn.Module, tokens: Tensor) -> int:
    """Return how many additions stand, at most, between the inputs and any number compared.

    Each weight matrix adds its two sizes (the sums of forward and of backward), attention and the
    loss add the tokens of the batch.

    Args:
        model: The plain module.
        tokens: Input_ids of a global batch, [B, L].
    """
    matrices = sum(sum(p.shape) for p in model.parameters() if p.ndim > 1)
    return matrices + 2 * tokens.numel()


def widest(tensor: Tensor) -> Tensor:
    """Return a tensor, dense, in the widest dtype of its kind."""
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return dense.to(torch.complex128) if dense.is_complex() else dense.double()


def root_mean_square(tensors: Iterable[Tensor]) -> float:
    """Return the size of a typical element of all tensors together."""
    total, count = 0.0, 0
    for tensor in tensors:
        total += float(torch.linalg.vector_norm(widest(tensor))) ** 2
        count += tensor.numel()
    return math.sqrt(total / count) if count else 0.0


def scale_of(whole: Tensor, typical: float) -> float:
    """Return what a difference from one process's tensor is measured by.

    It is the tensor's 2-norm, but at least that of as many typical elements: what is smaller is
    what remains of terms that cancel (a key's bias without rotation, whose gradient is zero), and
    rounding goes by the terms.
    """
    norm = float(torch.linalg.vector_norm(widest(whole)))
    return max(norm, typical * math.sqrt(whole.numel()))
