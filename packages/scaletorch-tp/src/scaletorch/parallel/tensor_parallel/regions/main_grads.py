"""Gradients of weights that are computed late, and the float32 main gradients that sum them.

The sum of many micro-batches' gradients needs more digits than a 16-bit weight has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ....dist.errors import StateError
from ...pg_manager.building import bias_gradient, weight_factors

# Of each call of a layer: the gradient of its output [..., out], and its input [..., in].
Products = Sequence[tuple[Tensor, Tensor]]


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


def weight_grad(products: Products, main_grad: Tensor | None = None) -> Tensor | None:
    """Return the sum of the products' gradients of the weight [out, in], None without any.

    With a main gradient they are added there, and None is returned; what is not of its dtype is
    rounded once before.
    """
    total: Tensor | None = None
    for grad, x in products:
        rows, columns = weight_factors(grad, x)
        if main_grad is None:
            total = rows.mm(columns) if total is None else total.addmm(rows, columns)
        elif main_grad.dtype == x.dtype:
            main_grad.addmm_(rows, columns)
        else:
            main_grad.add_(rows.mm(columns))
    return total


def bias_grad(products: Products, main_grad: Tensor | None = None) -> Tensor | None:
    """Return the sum of the products' gradients of the bias [out]; otherwise as `weight_grad`."""
    total: Tensor | None = None
    for grad, _ in products:
        if main_grad is None:
            own = bias_gradient(grad)
            total = own if total is None else total + own
        else:
            main_grad.add_(bias_gradient(grad, main_grad.dtype))
    return total


def add_own(parameter: Tensor) -> None:
    """Add the gradient that autograd made, if any, to the main one."""
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
