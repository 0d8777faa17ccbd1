"""What the autograd functions here have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable as _careful


def apply(function: type[Function], *args: Any) -> Any:
    """Apply an autograd function, which torch has no type for."""
    return function.apply(*args)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Do what torch's own does, at less cost in a first backward: there gradients are off."""
    careful = _careful(backward)

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        return (careful if torch.is_grad_enabled() else backward)(ctx, *grads)

    return run


def add_pairs(rows: Tensor, at: Tensor, size: int) -> Tensor:
    """Add rows [S, …] to [size, …] at `at`, [S], no more than two to each.

    A sum of two is rounded once, whatever the dtype and the order.
    """
    return rows.new_zeros((size, *rows.shape[1:])).index_add_(0, at, rows)
