"""Whether a model's own code hands the gradients of hidden states on as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

# Their backwards pass gradients on and tell a module's hooks, or its shards: no trial may run them.
_HOOKS_OF_MODULES = {"BackwardHookFunctionBackward", "RegisterPostBackwardFunctionBackward"}


def trained_beside(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves, mostly parameters, that outputs depend on not through inputs."""
    nodes = _between(outputs, inputs)
    return [node.variable for node in nodes if hasattr(node, "variable")]


def hands_on_gradients(given: Sequence[Tensor], received: Sequence[Tensor]) -> bool:
    """Return whether the gradients of tensors are those of the tensors that they were made from.

    A trial with numbers that every dtype can hold; the given tensors have the values of the
    received ones, one by one.
    """
    pairs = [
        (ours, theirs)
        for ours, theirs in zip(given, received, strict=True)
        if ours is not theirs and theirs.requires_grad
    ]
    nodes = _between([ours for ours, _ in pairs], received)
    if not pairs or any(node.name() in _HOOKS_OF_MODULES for node in nodes):
        return True
    outputs, inputs = zip(*pairs, strict=True)
    trials = [_trial(tensor) for tensor in outputs]
    gradients = torch.autograd.grad(outputs, inputs, trials, retain_graph=True, allow_unused=True)
    return all(
        gradient is not None and torch.equal(gradient, trial.to(gradient.dtype))
        for gradient, trial in zip(gradients, trials, strict=True)
    )


def _between(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Iterator[Node]:
    """Yield the nodes of the graph from outputs back to inputs, or to leaves."""
    seen = {get_gradient_edge(tensor).node for tensor in inputs if tensor.requires_grad}
    todo = [get_gradient_edge(tensor).node for tensor in outputs if tensor.requires_grad]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += [following for following, _ in node.next_functions if following is not None]


def _trial(tensor: Tensor) -> Tensor:
    numbers = torch.arange(tensor.numel(), device=tensor.device).remainder(17).sub(8)
    return numbers.div(8).to(tensor.dtype).view(tensor.shape)
