"""What the autograd functions here have in common."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


def apply(function: type[Function], *args: Any) -> Any:
    """Apply an autograd function, which torch has no type for."""
    return function.apply(*args)


def add_pairs(rows: Tensor, at: Tensor, size: int) -> Tensor:
    """Add rows [S, …] to [size, …] at `at`, [S], no more than two to each.

    A sum of two is rounded once, whatever the dtype and the order.
    """
    return rows.new_zeros((size, *rows.shape[1:])).index_add_(0, at, rows)
