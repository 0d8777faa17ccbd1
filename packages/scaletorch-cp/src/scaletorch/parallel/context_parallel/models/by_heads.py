"""Every `nn.MultiheadAttention` of a context-parallel model, tensor parallel or not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from .multihead import require_known
from .override import running_override, unbound
from .settings import settings_of

_FORWARD = inspect.signature(nn.MultiheadAttention.forward)


def attend_by_heads(model: nn.Module) -> None:
    """Let every `nn.MultiheadAttention` of a marked model attend to whole sequences, in place.

    It returns no weights, of which no rank has all. What it is asked for beside a causal mask is
    refused by its name.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            own = module.__dict__.get("forward")
            inner = type(module).forward if own is None else unbound(own)
            vars(module)["forward"] = MethodType(_without_weights(name, inner), module)


def _without_weights(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = settings_of(self)
        running = None if settings is None else running_override(settings)
        if settings is None or not settings.active or (running is not None and running.whole):
            return inner(self, *args, **kwargs)
        bound = _FORWARD.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        dropout = self.dropout if self.training else 0.0
        added = self.bias_k is not None or self.add_zero_attn
        require_known(f"{name or 'the model'} (nn.MultiheadAttention)", given, dropout, added)
        given["need_weights"] = False
        return inner(*bound.args, **bound.kwargs)

    return forward
