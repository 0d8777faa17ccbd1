"""Linear layers whose weight gradient is computed elsewhere, or later, than autograd would do it.

Data parallelism adds it to a bucket, a pipeline computes it after other stages have their inputs'
gradients, tensor parallelism while a sum travels. A layer's forward is taken over by one of them at
most; who comes later leaves it alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def plain_linears(model: nn.Module) -> Iterator[nn.Linear]:
    """Yield a model's linear layers that compute by `nn.Linear`'s own forward, taken by nobody."""
    for each in model.modules():
        if not isinstance(each, nn.Linear) or type(each).forward is not nn.Linear.forward:
            continue
        if "forward" not in vars(each):
            yield each


def take_forward(
    layer: nn.Linear, forward: Callable[..., Tensor], owner: object, *arguments: object
) -> Callable[[], None]:
    """Let a layer compute `forward(layer, owner, *arguments, input)`.

    Args:
        layer: One of `plain_linears`.
        forward: A function of a module, so that it can be pickled.
        owner: Who takes it over; copied and pickled with the layer.
        arguments: Further ones, the same at each call.

    Returns:
        A function that undoes it, unless another has taken the layer over since; it keeps neither
        layer nor owner alive.
    """
    # A partial, not a closure, so that a deep copy and pickle take the layer and its owner along.
    layer.forward = partial(forward, layer, owner, *arguments)  # type: ignore[method-assign]
    return partial(_give_back, weakref.ref(layer), weakref.ref(owner))


def _give_back(layer: weakref.ref[nn.Linear], owner: weakref.ref[object]) -> None:
    module, taker = layer(), owner()
    forward = None if module is None else vars(module).get("forward")
    if isinstance(forward, partial) and taker is not None and forward.args[1] is taker:
        vars(module).pop("forward")


def linear_output(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a linear layer's output [..., out] from within an autograd function.

    Args:
        inputs: [..., in].
        weight: [out, in].
        bias: [out].
    """
    output = F.linear(inputs, weight, bias)
    # Not a view for autograd, so that it may be changed in place, as by nn.ReLU(inplace=True).
    return torch.ops.aten._unsafe_view(output, output.shape)  # type: ignore[no-any-return]


def weight_factors(gradient: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return two matrices whose product is a weight's gradient: [out, n] and [n, in].

    Args:
        gradient: That of the output [..., out].
        inputs: [..., in].
    """
    return _rows(gradient).t(), _rows(inputs)


def bias_gradient(gradient: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a bias's gradient [out], summed in `dtype`.

    Args:
        gradient: That of the output [..., out].
        dtype: None is the gradient's.
    """
    return _rows(gradient).sum(0, dtype=dtype)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
