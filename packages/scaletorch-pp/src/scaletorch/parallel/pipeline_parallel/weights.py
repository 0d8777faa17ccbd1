"""Backwards in two parts: gradients of the inputs at once, those of linear weights later."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .autocast import as_autocast

Inputs = tuple[Tensor, Tensor]  # of a linear layer, and the gradient of its output


class WeightGradients:
    """The weight gradients that one backward of inputs has left for later."""

    def __init__(self) -> None:
        self._left: list[tuple[Tensor, Inputs]] = []

    def leave(self, weight: Tensor, inputs: Tensor, gradient: Tensor) -> None:
        """Leave the gradient of a weight for later.

        Args:
            weight: [out, in]; ``inputs @ weight.T`` was the output.
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
    """Where weight gradients of a stage's linear layers go: nowhere special, unless `into` is set.

    Attributes:
        into: What collects them during a backward of inputs.
    """

    def __init__(self) -> None:
        self.into: WeightGradients | None = None


def defer_weight_gradients(model: nn.Module, deferral: Deferral) -> None:
    """Let every `nn.Linear` of a model compute its weight's gradient later, where that is asked.

    Only layers that use `nn.Linear`'s own forward do; what others compute in a backward they
    compute at once.
    """
    for module in model.modules():
        if type(module).forward is nn.Linear.forward and "forward" not in vars(module):
            module.forward = MethodType(_Forward(deferral), module)


class _Forward:
    """The forward of a linear layer; a class so that a deep copy of a module keeps its own."""

    def __init__(self, deferral: Deferral) -> None:
        self._deferral = deferral

    def __call__(self, module: nn.Linear, inputs: Tensor) -> Tensor:
        weight: Tensor = module.weight
        bias: Tensor | None = module.bias
        if not torch.is_grad_enabled() or not weight.requires_grad:
            return F.linear(inputs, weight, bias)
        if bias is not None:
            bias = as_autocast(bias)
        inputs, weight = as_autocast(inputs), as_autocast(weight)
        output: Tensor = _Linear.apply(inputs, weight, bias, self._deferral)  # type: ignore[no-untyped-call]
        return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, deferral: Deferral
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.deferral = deferral
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_inputs = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_inputs = gradient @ weight
        if ctx.needs_input_grad[2]:
            of_bias = _rows(gradient).sum(0)
        if ctx.needs_input_grad[1]:
            into = ctx.deferral.into
            if into is None:
                of_weight = _of_weight(inputs, gradient)
            else:
                into.leave(weight, inputs, gradient)
        return of_inputs, of_weight, of_bias, None


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, inputs: Inputs) -> Tensor:
        ctx.inputs = inputs
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        of_weight = _of_weight(*ctx.inputs)
        ctx.inputs = None
        return of_weight, None


def _of_weight(inputs: Tensor, gradient: Tensor) -> Tensor:
    return _rows(gradient).t() @ _rows(inputs)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
