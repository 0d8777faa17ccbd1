"""Backwards in two parts: gradients of the inputs at once, those of linear weights later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..runtime.forms import as_autocast

Inputs = tuple[Tensor, Tensor]  # of a linear layer, and the gradient of its output


class WeightGradients:
    """The weight gradients that one backward of inputs has left for later."""

    def __init__(self) -> None:
        self.open = False  # whether the backward that leaves them is running, and no other
        self._left: list[tuple[Tensor, Inputs]] = []

    def gradients(self) -> list[Tensor]:
        """Return the outputs' gradients, which are kept until `accumulate`."""
        return [gradient for _, (_, gradient) in self._left]

    def leave(self, weight: Tensor, inputs: Tensor, gradient: Tensor) -> None:
        """Leave the gradient of a weight for later.

        Args:
            weight: [out, in], a leaf; `inputs @ weight.T` was the output.
            inputs: [..., in].
            gradient: [..., out], that of the output.
        """
        self._left.append((weight, (inputs.detach(), gradient)))

    def accumulate(self) -> None:
        """Compute them and let autograd add them, hooks and all, one after another."""
        roots: list[Tensor] = [_Later.apply(*each) for each in self._left]  # type: ignore[no-untyped-call]
        self._left = []
        if roots:
            torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])


class Deferral:
    """The place for weight gradients of a stage's linear layers: none unless `into` is set.

    Attributes:
        into: Collects those of the forward that is running, or running again.
    """

    def __init__(self) -> None:
        self.into: WeightGradients | None = None

    @contextmanager
    def to(self, into: WeightGradients | None, *, backward: bool = False) -> Iterator[None]:
        """Let the forwards in this context leave their weight gradients for later.

        Args:
            into: Collects them; None leaves none.
            backward: Whether it is their backward that runs in this context.
        """
        if into is None:
            yield
            return
        self.into, into.open = into, backward
        try:
            yield
        finally:
            self.into, into.open = None, False


def defer_weight_gradients(model: nn.Module, deferral: Deferral) -> None:
    """Let every `nn.Linear` of a model compute its weight's gradient later, if that is asked.

    Only layers that use `nn.Linear`'s own forward do; all others compute it at once.
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
    # A weight that is itself computed has a graph, which is gone after the first backward.
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
        root: Tensor,  # requires grad, and so does the output, where neither inputs nor bias do
        later: tuple[Tensor, WeightGradients],
    ) -> Tensor:
        ctx.later, ctx.trained_later = later, later[:1]
        # Saved for its version alone too: autograd refuses weights that were changed in between.
        ctx.save_for_backward(inputs, later[0])
        output = F.linear(inputs, as_autocast(later[0].detach()), bias)
        # Not a view for autograd, so that it may be changed in place, as by nn.ReLU(inplace=True).
        return torch.ops.aten._unsafe_view(output, output.shape)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_inputs = of_bias = None
        if ctx.needs_input_grad[0]:
            of_inputs = gradient @ weight.to(gradient.dtype)
        if ctx.needs_input_grad[1]:
            of_bias = _rows(gradient).sum(0)
        weight, into = ctx.later
        if into.open:  # and not a gradient that the model takes in its own forward
            into.leave(weight, inputs, gradient)
        return of_inputs, of_bias, None, None


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


def give_own_memory(parameters: Iterable[nn.Parameter], kept: Iterable[Tensor]) -> None:
    """Give gradients memory of their own if autograd took that of tensors still to be used.

    It takes views as they are, and adds the next micro-batch's into them.
    """
    memory = {tensor.untyped_storage().data_ptr() for tensor in kept}
    for parameter in parameters:
        gradient = parameter.grad
        if type(gradient) is not Tensor or gradient.layout != torch.strided:
            continue  # none, or one that only stands for shards elsewhere
        if gradient.untyped_storage().data_ptr() in memory:
            parameter.grad = gradient.clone()
