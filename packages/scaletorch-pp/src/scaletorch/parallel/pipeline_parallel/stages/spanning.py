"""Modules around layers of several stages: each stage calls them, and has only some of the rest."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from ....dist.building import tensors_in
from ....dist.errors import InvalidArgumentError
from ...pg_manager import describe_rank
from ..splitting.modules import within
from ..splitting.split import Placement
from .calls import surround


def watch_spanning(model: nn.Module, placement: Placement) -> None:
    """Let modules inside a model that hold those of several stages refuse hooks that would be lost.

    A full backward hook has the gradients of a call's output and of its input. No stage has both.
    """
    for name, module in model.named_modules():
        stages = {home for each, home in placement.homes() if within(each, name)}
        if name and len(stages) > 1 and type(module).forward is not nn.Module.forward:
            surround(module, _Spanning(name))


class _Spanning:
    """Looks at the backward hooks of a module in each call."""

    def __init__(self, name: str) -> None:
        self._name, self._warned = name, False

    def takes_forward(self) -> bool:
        """Return false: hooks do not run around `forward` alone."""
        return False

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments as they are.

        Raises:
            InvalidArgumentError: A full backward hook waits for the gradient of one of them.
        """
        hooked = module._backward_hooks or global_hooks._global_backward_hooks
        if not hooked or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return args, kwargs
        if not any(tensor.requires_grad for tensor in tensors_in(args)):
            return args, kwargs  # then torch calls it with the gradient of the output alone
        text = (
            f"{describe_rank()}: {self._name} holds layers of several stages, none of which has "
            "the gradients of its output and of its input: put the backward hook on layers"
        )
        if module._backward_hooks:
            raise InvalidArgumentError(text)
        if not self._warned:
            self._warned = True
            warnings.warn(f"global backward hooks do not see it. {text}", stacklevel=2)
        return args, kwargs

    def after(self, module: nn.Module, output: Any) -> Any:
        """Return the output as it is."""
        return output
