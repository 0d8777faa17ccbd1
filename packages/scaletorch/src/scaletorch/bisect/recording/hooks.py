"""Hooks into a program that is recorded: calls, gradients, clipping and optimizer steps."""

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
    """Replace every call of a module by `called(original, module, *args, **kwargs)`."""
    kind: Any = nn.Module
    original = kind.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Compiled code is one unit, and a rehearsal is not part of the training.
        if torch.compiler.is_compiling() or rehearses():
            return original(self, *args, **kwargs)
        return called(original, self, *args, **kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = original


def follow_gradient(tensor: Tensor, came: Callable[[Tensor | None], None]) -> None:
    """Call `came` with a tensor's gradient, by a hook on the leaf or on the node that made it."""
    node, number = tensor.grad_fn, tensor.output_nr
    if node is None:
        tensor.register_hook(came)
    else:
        node.register_prehook(lambda gradients: came(gradients[number]))


@contextmanager
def backward_to(backwarded: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `backwarded` with each scalar that backward starts from, also by `Tensor.backward`."""
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
    """Let a `Tape` record gradients before clipping and optimizer steps, and the new weights."""
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
