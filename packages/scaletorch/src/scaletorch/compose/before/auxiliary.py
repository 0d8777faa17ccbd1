"""Losses that a model would add to its own: refused, as a training step leaves them out."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...dist.errors import InvalidArgumentError


def require_no_router_loss(model: nn.Module) -> None:
    """Refuse a model whose config asks for a router's auxiliary loss.

    Raises:
        InvalidArgumentError: It does, with the way to turn it off.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        factor = getattr(config, "router_aux_loss_coef", None)
        wanted = getattr(config, "output_router_logits", False) is True
        if wanted and isinstance(factor, int | float) and factor > 0:
            raise InvalidArgumentError(
                f"the config of {type(module).__name__} asks for a router's auxiliary loss "
                f"(output_router_logits=True, router_aux_loss_coef={factor}), and train_step "
                "trains by the cross entropy of tokens alone: the loss would be left out. Set "
                "output_router_logits=False in the config to train without it"
            )


def require_logits_alone(output: Any) -> None:
    """Refuse an output that has a loss beside its logits.

    Raises:
        InvalidArgumentError: It has, or it has no logits.
    """
    given = (
        output if isinstance(output, dict) else vars(output) if hasattr(output, "__dict__") else {}
    )
    for name in ("aux_loss", "loss", "z_loss"):
        value = None if isinstance(output, Tensor) else given.get(name)
        if isinstance(value, Tensor) and value.requires_grad:
            raise InvalidArgumentError(
                f"{type(output).__name__} has {name} beside its logits, and train_step trains by "
                f"the cross entropy of tokens alone: {name} would be left out. Turn it off in the "
                "model, or write the loss yourself (train_step_pipeline takes a loss_fn)"
            )
    if not isinstance(getattr(output, "logits", output), Tensor):
        raise InvalidArgumentError(
            "train_step needs a model that returns its logits [B, L, V], or an output that has "
            f"them as .logits; it returned {_described(output)}"
        )


def _described(output: Any) -> str:
    if isinstance(output, tuple | list):
        inner = ", ".join(_described(entry) for entry in output)
        return f"a {type(output).__name__} of {inner or 'nothing'}"
    if isinstance(output, Tensor):
        return f"a tensor {list(output.shape)}"
    return type(output).__name__
