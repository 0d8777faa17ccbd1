"""Split backwards: gradients of the inputs at once, gradients of linear weights later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....dist.functional import spmd_local
from ..runtime.forms import as_autocast

Inputs = tuple[Tensor, Tensor]  # the input of a linear layer, and the gradient of its output


class WeightGradients:
    """The weight gradients that one backward of inputs has postponed."""

    def __init__(self) -> None:
        self.open = False  # whether the backward that postpones them is running
        self._left: list[tuple[Tensor, Inputs]] = []

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the layers' outputs, which are kept until `accumulate`."""
        return [gradient for _, (_, gradient) in self._left]

    def leave(self, weight: Tensor, inputs: Tensor, gradient: Tensor) -> None:
        """Postpone the gradient of a weight [out, in], from inputs [..., in] and an output's."""
        self._left.append((weight, (inputs.detach(), gradient)))

    def accumulate(self) -> None:
        """Compute the gradients one after another; autograd adds them and runs hooks."""
        roots: list[Tensor] = [_Later.apply(*each) for each in self._left]  # type: ignore[no-untyped-call]
        self._left = []
        if roots:
            torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])


class Deferral:
    """The destination of the running forward's weight gradients; None in `into` postpones none."""

    def __init__(self) -> None:
        self.into: WeightGradients | None = None

    @contextmanager
    def to(self, into: WeightGradients, *, backward: bool = False) -> Iterator[None]:
        """Postpone the weight gradients of the forwards in this context, or run their backward."""
        self.into, into.open = into, backward
        try:
            yield
        finally:
            self.into, into.open = None, False


def defer_weight_gradients(model: nn.Module, deferral: Deferral) -> None:
    """Let every `nn.Linear` of a model postpone its weight's gradient while `deferral` is set.

    Layers with another forward than `nn.Linear`'s own compute it at once.
    """
    for layer in model.modules():
        own = "forward" in vars(layer)
        if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward and not own:
            # A partial, not a closure, so that copies and pickles take layer and deferral along.
            layer.forward = partial(_forward, layer, deferral)  # type: ignore[method-assign]


def _forward(module: nn.Linear, deferral: Deferral, input: Tensor) -> Tensor:
    weight: Tensor = module.weight
    bias: Tensor | None = module.bias
    trained = torch.is_grad_enabled() and weight.requires_grad
    # A computed weight (not a leaf) has a graph, which the first backward frees.
    if deferral.into is None or not trained or not weight.is_leaf:
        return F.linear(input, weight, bias)
    bias = bias if bias is None else as_autocast(bias)
    output: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        as_autocast(input), bias, weight.new_empty(0).requires_grad_(), (weight, deferral.into)
    )
    return output


class _Linear(torch.autograd.Function):
    # The weight is hidden from autograd: its hooks would run in the backward of inputs, with None.
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        bias: Tensor | None,
        root: Tensor,  # requires grad, so that the output does even if inputs and bias do not
        later: tuple[Tensor, WeightGradients],
    ) -> Tensor:
        # Code that walks the graph for parameters (tensor parallelism) reads these attributes.
        ctx.later, ctx.trained_later = later, later[:1]
        # The weight is saved for its version too: autograd raises if it was changed in place.
        ctx.save_for_backward(inputs, later[0])
        output = F.linear(inputs, as_autocast(later[0].detach()), bias)
        # Not a view for autograd, so nn.ReLU(inplace=True) and the like may change it in place.
        return torch.ops.aten._unsafe_view(output, output.shape)  # type: ignore[no-any-return]

    @staticmethod
    def spmd_typecheck(
        output: Tensor,
        *,
        inputs: Tensor,
        bias: Tensor | None,
        root: Tensor,
        later: tuple[Tensor, Any],
    ) -> None:
        """Give the output the type of a product, for the checker of `spmd_types`."""
        spmd_local(output, inputs, later[0], bias, root)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        inputs_gradient = bias_gradient = None
        if ctx.needs_input_grad[0]:
            inputs_gradient = gradient @ weight.to(gradient.dtype)
        if ctx.needs_input_grad[1]:
            bias_gradient = _rows(gradient).sum(0)
        weight, into = ctx.later
        if into.open:  # closed if the model itself computes a gradient in its forward
            into.leave(weight, inputs, gradient)
        return inputs_gradient, bias_gradient, None, None


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, inputs: Inputs) -> Tensor:
        ctx.inputs = inputs
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        inputs, gradient = ctx.inputs
        ctx.inputs = None
        return _rows(gradient).t() @ _rows(inputs), None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
