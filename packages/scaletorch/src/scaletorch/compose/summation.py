"""Bounds for rounding errors, from the number of additions and the size of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

ROOM = 4.0  # allowed error / (epsilon x sqrt(additions)); real runs have 0.1 to 0.3


def chain_length(model: nn.Module, tokens: Tensor) -> int:
    """Return an upper bound of the additions between the inputs and any number compared.

    Each weight matrix of the plain model adds its two sizes (for the sums of forward and backward);
    attention and the loss each add the number of `tokens`, the `input_ids` [B, L] of a global
    batch.
    """
    matrices = sum(sum(p.shape) for p in model.parameters() if p.ndim > 1)
    return matrices + 2 * tokens.numel()


def widest(tensor: Tensor) -> Tensor:
    """Return a tensor as dense float64 or complex128."""
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return dense.to(torch.complex128) if dense.is_complex() else dense.double()


def root_mean_square(tensors: Iterable[Tensor]) -> float:
    """Return the root mean square of the elements of all tensors together."""
    total, count = 0.0, 0
    for tensor in tensors:
        total += float(torch.linalg.vector_norm(widest(tensor))) ** 2
        count += tensor.numel()
    return math.sqrt(total / count) if count else 0.0


def scale_of(whole: Tensor, typical: float) -> float:
    """Return the scale by which a difference from one process's tensor is divided.

    It is the tensor's 2-norm, but at least that of as many elements of size `typical`: a smaller
    tensor is the rest of terms that cancel, and rounding depends on the size of the terms.
    """
    norm = float(torch.linalg.vector_norm(widest(whole)))
    return max(norm, typical * math.sqrt(whole.numel()))
