"""What outputs are trained by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


def trained_beside(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves, mostly parameters, that outputs depend on not through inputs."""
    nodes = _between(outputs, inputs)
    return [node.variable for node in nodes if hasattr(node, "variable")]


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
