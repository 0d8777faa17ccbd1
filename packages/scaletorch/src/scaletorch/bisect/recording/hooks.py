"""Hooks of a program that is recorded: at calls, gradients, clipping and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...compose.forward import rehearses


@contextmanager
def calls_to(called: Callable[..., Any]) -> Iterator[None]:
    """Let every call of a module go by `called(original, module, *args, **kwargs)`."""
    kind: Any = nn.Module
    original = kind.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # What is compiled is one step, and a rehearsal is none.
        if torch.compiler.is_compiling() or rehearses():
            return original(self, *args, **kwargs)
        return called(original, self, *args, **kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = original


def follow_gradient(tensor: Tensor, came: Callable[[Tensor | None], None]) -> None:
    """Hear of a tensor's gradient; a tensor of the graph gets no hook itself, but its node does."""
    node, number = tensor.grad_fn, tensor.output_nr
    if node is None:
        tensor.register_hook(came)
    else:
        node.register_prehook(lambda gradients: came(gradients[number]))


@contextmanager
def backward_to(backwarded: Callable[[Tensor], None]) -> Iterator[None]:
    """Tell of each number that a program goes back from; `Tensor.backward` comes by here too."""
    original = torch.autograd.backward

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # not within a backward
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            given = grad_tensors if isinstance(grad_tensors, (list, tuple)) else [grad_tensors]
            for root, weight in zip(roots, [*given, *[None] * len(roots)], strict=False):
                if isinstance(root, Tensor) and root.numel() == 1 and weight is None:
                    backwarded(root)
        original(tensors, grad_tensors, *args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original


@contextmanager
def followed(tape: Any) -> Iterator[None]:
    """Tell a `Tape` of gradients before torch clips or uses them, and of updated weights."""
    stepped = False
    clip = torch.nn.utils.clip_grad_norm_

    def clipped(*args: Any, **kwargs: Any) -> Tensor:
        tape.gradients()
        total = clip(*args, **kwargs)
        tape.norm(getattr(total, "full_tensor", lambda: total)())
        return total

    def before(*_: Any) -> None:
        tape.gradients()

    def after(*_: Any) -> None:
        nonlocal stepped
        stepped = True

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    torch.nn.utils.clip_grad_norm_ = clipped
    try:
        yield
        tape.gradients()
        if stepped:
            tape.weights()
    finally:
        torch.nn.utils.clip_grad_norm_ = clip
        for hook in hooks:
            hook.remove()
