"""Main gradients in float32, to which the gradients of many micro-batches are added.

The sum of many micro-batches' gradients needs more digits than a 16-bit weight has.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....dist.errors import StateError


def keep_main_grads(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Give each trainable parameter a zero `main_grad`, to which its gradients are added.

    `parameter.grad` is None after a backward. Layers that overlap and row-parallel ones add the
    product itself; other gradients are made in the parameter's dtype, then added. Zero them with
    `parameter.main_grad.zero_()`.

    Args:
        model: With its tensor-parallel layers, before a data-parallel wrapper.
        dtype: Of the main gradients.

    Raises:
        StateError: A parameter has gradient hooks, which would see no gradient.
    """
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    for name, each in parameters.items():
        if each._post_accumulate_grad_hooks or each._backward_hooks:
            raise StateError(
                f"{name} has gradient hooks, which see no gradient where main gradients are kept: "
                "a data-parallel wrapper has hooks; reduce main gradients without one"
            )
    for each in parameters.values():
        each.main_grad = torch.zeros_like(each, dtype=dtype)  # type: ignore[attr-defined]
        each.register_post_accumulate_grad_hook(add_own)


def add_own(parameter: Tensor) -> None:
    """Add the gradient that autograd made, if any, to the main one."""
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
