"""Modules that run otherwise while attention is over shards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from .override import AttentionOverride, running_override, unbound
from .settings import Settings, settings_of


class Call(NamedTuple):
    """One call of a module that runs otherwise.

    Attributes:
        module: The module.
        inner: Its own forward, bound to it.
        args: What it is called with by place.
        kwargs: What it is called with by name.
        settings: Of the model that it is a part of.
        override: The one that is on, if any is.
    """

    module: nn.Module
    inner: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    settings: Settings
    override: AttentionOverride | None

    @property
    def given(self) -> Mapping[str, Any]:
        """What the model was called with by name."""
        return {} if self.override is None else self.override.given

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's own forward, with its own attention: it has whole sequences."""
        with nullcontext() if self.override is None else self.override.left_alone():
            return self.inner(*args, **kwargs)


def take_over(module: nn.Module, otherwise: Callable[[Call], Any]) -> None:
    """Let a module run otherwise while attention is over shards, in place.

    Args:
        module: A part of a context-parallel model.
        otherwise: Takes a call and returns what the module returns; it counts as attention.
    """
    own = module.__dict__.get("forward")
    inner = type(module).forward if own is None else unbound(own)

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        settings = settings_of(self)
        if settings is None or not settings.active:
            return inner(self, *args, **kwargs)
        override = running_override(settings)
        if override is not None:
            override.calls += 1
        bound = functools.partial(inner, self)
        return otherwise(Call(self, bound, args, kwargs, settings, override))

    module.forward = MethodType(forward, module)
