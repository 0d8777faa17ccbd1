"""Which batch a backward is of: what is recomputed in it has to attend by the same one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .settings import Settings, Told


def note_backward(output: Any, settings: Settings) -> None:
    """Let the backward of a model's output know by which batch its forward attended."""
    if not torch.is_grad_enabled():
        return
    begun = partial(_begun, settings, settings.told)
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(begun)  # a hook of the tensor could change gradients


def _begun(settings: Settings, told: Told | None, _: object) -> None:
    settings.begin_backward(told)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output: itself, or those in containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from tensors_in(entry)
