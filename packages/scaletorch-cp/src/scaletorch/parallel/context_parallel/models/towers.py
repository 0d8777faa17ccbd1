"""Towers of models of `transformers` for other inputs than text: they are left out of a shard.

A tower for images or sound numbers its own positions, and its outputs would have to find their
places in shards of text. Batches of text alone do not run it. So one that cannot be context
parallel is refused when it is called, not with the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from ....dist.errors import InvalidArgumentError
from .calls import forward_of, is_pretrained
from .override import unbound
from .settings import refusal, settings_of

_TEXT = ("input_ids", "inputs_embeds")


def find_towers(model: nn.Module) -> set[nn.Module]:
    """Return models within a model that text does not run.

    They are beside its decoder, or in it and take no ids.
    """
    found: set[nn.Module] = set()
    for part in filter(is_pretrained, model.modules()):
        tell: Any = getattr(part, "get_decoder", None)
        decoder = tell() if callable(tell) else None
        if not isinstance(decoder, nn.Module):
            continue
        inside = {*decoder.modules()}
        for other in filter(is_pretrained, part.modules()):
            holds = any(module is decoder for module in other.modules())
            takes = any(name in forward_of(other).parameters for name in _TEXT)
            if other is not part and not holds and not (other in inside and takes):
                found.add(other)
    return found


def refuse_calls(tower: nn.Module, why: InvalidArgumentError) -> None:
    """Let calls of a tower be refused wherever attention is over shards, in place."""
    own = tower.__dict__.get("forward")
    inner = type(tower).forward if own is None else unbound(own)
    if not hasattr(inner, _MARK):
        tower.forward = MethodType(_refusing(inner, str(why)), tower)


_MARK = "refuses_calls"


def _refusing(inner: Callable[..., Any], why: str) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        settings = settings_of(self)
        if settings is not None and settings.active:
            raise refusal(
                f"{type(self).__name__} is run, and text alone can be divided in this model: call "
                f"it without other inputs, or keep sequences whole ({why})"
            )
        return inner(self, *args, **kwargs)

    setattr(forward, _MARK, True)
    return forward
