"""Which batch a backward is of: what is recomputed in it has to attend by the same one."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ....dist.building import tensors_in
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
