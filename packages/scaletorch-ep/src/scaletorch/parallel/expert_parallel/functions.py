"""What the autograd functions here have in common."""

from __future__ import annotations

from typing import Any

from torch.autograd import Function


def apply(function: type[Function], *args: Any) -> Any:
    """Apply an autograd function, which torch has no type for."""
    return function.apply(*args)
