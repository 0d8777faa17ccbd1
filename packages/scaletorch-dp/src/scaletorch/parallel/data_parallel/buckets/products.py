"""Linear layers whose weight gradients are computed right into the bucket's buffer.

A gradient of its own would be written, read, and written once more; a product added by the matrix
multiplication itself is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....dist.building import prepare_backward
from ...pg_manager.building import (
    bias_gradient,
    linear_output,
    plain_linears,
    take_forward,
    weight_factors,
)

# Takes a slot's index, rows and columns, and adds rows @ columns to the gradient; False if it must
# go the usual way.
AddProduct = Callable[[int, Tensor, Tensor], bool]


class ProductSink:
    """Takes the products of linear layers; none in a copy, nor once the wrapper is gone."""

    __slots__ = ("__weakref__", "_weights", "add")

    def __init__(self, add: AddProduct | None = None, weights: Iterable[nn.Parameter] = ()) -> None:
        self.add = add
        self._weights = [weakref.ref(each) for each in weights]

    def takes(self, index: int, weight: Tensor) -> bool:
        """Return whether a slot is this very weight's."""
        return self.add is not None and self._weights[index]() is weight

    def __reduce__(self) -> tuple[type[ProductSink], tuple[()]]:
        return ProductSink, ()  # a copy's gradients are its own


def direct_products(
    module: nn.Module, parameters: Iterable[nn.Parameter], sink: ProductSink
) -> Callable[[], None]:
    """Let the linear layers of a module leave their weights' products in a sink, in place.

    Only layers that use `nn.Linear`'s own forward do, and whose weights are contiguous.

    Args:
        module: The model.
        parameters: The slots' parameters, in the order of their indices.
        sink: Takes the products.

    Returns:
        A function that undoes it; it keeps nothing alive.
    """
    index_of: dict[Tensor, int] = {each: index for index, each in enumerate(parameters)}
    prepare_backward(index_of)
    undos = []
    for layer in plain_linears(module):
        index = index_of.get(layer.weight)
        if index is not None and layer.weight.is_contiguous():
            undos.append(take_forward(layer, _forward, sink, index))
    return partial(_all, undos)


def _all(undos: Iterable[Callable[[], None]]) -> None:
    for undo in undos:
        undo()


def _forward(module: nn.Linear, sink: ProductSink, index: int, input: Tensor) -> Tensor:
    weight: Tensor = module.weight
    bias: Tensor | None = module.bias
    trained = torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf
    if not trained or not sink.takes(index, weight) or not _is_plain(input, weight):
        return F.linear(input, weight, bias)
    output: Tensor = _Linear.apply(input, weight, bias, (sink, index))  # type: ignore[no-untyped-call]
    return output


def _is_plain(input: Tensor, weight: Tensor) -> bool:
    """Return whether the layer computes with just these tensors, and nobody transforms it."""
    return (
        type(input) is Tensor
        and input.dtype == weight.dtype
        and input.dtype.is_floating_point
        and not input.is_nested
        and weight.numel() > 0
        and not torch.is_autocast_enabled(input.device.type)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, to: tuple[ProductSink, int]
    ) -> Tensor:
        ctx.to = to
        ctx.save_for_backward(inputs, weight if ctx.needs_input_grad[0] else None)
        return linear_output(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        of_inputs = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_inputs = gradient @ weight
        if ctx.needs_input_grad[1]:
            of_weight = _weight_gradient(ctx, *weight_factors(gradient, inputs))
        if ctx.needs_input_grad[2]:
            of_bias = bias_gradient(gradient)
        return of_inputs, of_weight, of_bias, None


def _weight_gradient(ctx: Any, rows: Tensor, columns: Tensor) -> Tensor | None:
    """Return the gradient of the weight, or None if the sink has taken it."""
    sink, index = ctx.to
    if torch.is_grad_enabled() or sink.add is None or not _is_added(ctx.next_functions[1][0]):
        return rows @ columns
    return None if sink.add(index, rows, columns) else rows @ columns


def _is_added(node: Any) -> bool:
    """Return whether the running backward adds to the gradient of a leaf, given its node."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad, which takes the gradient for itself
        return False
