"""Optimizers and clipping, followed while a step is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class Follows(Protocol):
    """What hears of them."""

    def gradients(self) -> None:
        """Gradients are about to be clipped or used."""

    def norm(self, total: Tensor) -> None:
        """This is their norm."""

    def moments(self, optimizers: Any) -> None:
        """Optimizers have made their steps."""

    def weights(self) -> None:
        """Weights are the step's."""


@contextmanager
def followed(tape: Follows) -> Iterator[None]:
    """Tell of gradients before torch clips them or an optimizer has them, and of what it did."""
    stepped: dict[int, Optimizer] = {}
    clip = torch.nn.utils.clip_grad_norm_

    def clipped(*args: Any, **kwargs: Any) -> Tensor:
        tape.gradients()
        total = clip(*args, **kwargs)
        tape.norm(getattr(total, "full_tensor", lambda: total)())
        return total

    def before(*_: Any) -> None:
        tape.gradients()

    def after(optimizer: Optimizer, *_: Any) -> None:
        stepped[id(optimizer)] = optimizer

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    torch.nn.utils.clip_grad_norm_ = clipped
    try:
        yield
        tape.gradients()
        if stepped:
            tape.moments(stepped.values())
            tape.weights()
    finally:
        torch.nn.utils.clip_grad_norm_ = clip
        for hook in hooks:
            hook.remove()
