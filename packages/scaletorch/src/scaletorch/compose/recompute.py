"""Activation recomputation: a layer keeps its inputs alone, and runs again in backward."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..parallel.pipeline_parallel import Split, layers_of


def recompute_layers(model: nn.Module, split: Split | None = None) -> None:
    """Let every layer of `model` drop its activations in forward, in place.

    A layer communicates again in backward as it did in forward. Random draws, such as
    dropout's, are the same both times.

    Args:
        model: A module that holds its layers in a list; already tensor and context parallel.
        split: Names the list; None infers it.

    Raises:
        InvalidArgumentError: The list of layers cannot be found.
    """
    for layer in dict.fromkeys(map(model.get_submodule, layers_of(model, split))):
        # Bound to the layer, so that a deep copy of the model calls itself, not this one.
        layer.forward = MethodType(_checkpointed(layer.forward), layer)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(forward, MethodType):
        inner = forward.__func__
    else:  # set on the instance as a plain function

        def inner(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

    def recomputing(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(self, *args, **kwargs)
        return checkpoint(inner, self, *args, use_reentrant=False, **kwargs)

    return recomputing
