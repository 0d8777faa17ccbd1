"""The loss of a step where a program does not say it: what it calls backward on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def backward_to(backwarded: Callable[[Tensor], None]) -> Iterator[None]:
    """Tell of each number that a program goes back from; `Tensor.backward` comes by here too."""
    original = torch.autograd.backward

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # not within a backward
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            given = grad_tensors if isinstance(grad_tensors, Sequence) else [grad_tensors]
            weights = [*given, *[None] * len(roots)]
            for root, weight in zip(roots, weights, strict=False):
                if isinstance(root, Tensor) and root.numel() == 1 and weight is None:
                    backwarded(root)
        original(tensors, grad_tensors, *args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original
