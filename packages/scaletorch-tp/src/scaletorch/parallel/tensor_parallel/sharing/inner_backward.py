"""See what a function of autograd runs backward itself, inside of its own backward.

Reversible layers, and checkpoints that are not torch's, make a graph that no forward shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ....dist.building import tensors_in

_CALLS = ("backward", "grad")


def watch_inner_backward(node: Node, look: Callable[[list[Tensor]], None]) -> None:
    """Call `look` with the outputs that a node runs backward, just before it does.

    Args:
        node: A node whose function is written in Python.
        look: Called with the roots of the inner graph.
    """
    originals: dict[str, Any] = {}

    def begin(_: Any) -> None:
        running = torch._C._current_graph_task_id()

        def watched(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(tensors: Any, *args: Any, **options: Any) -> Any:
                # After an error `end` does not run; then this is only passed through.
                if torch._C._current_graph_task_id() == running:
                    look([*tensors_in(tensors)])
                return original(tensors, *args, **options)

            return call

        for name in _CALLS:
            originals[name] = getattr(torch.autograd, name)
            setattr(torch.autograd, name, watched(originals[name]))

    def end(*_: Any) -> None:
        for name in _CALLS:
            setattr(torch.autograd, name, originals[name])

    node.register_prehook(begin)
    node.register_hook(end)
