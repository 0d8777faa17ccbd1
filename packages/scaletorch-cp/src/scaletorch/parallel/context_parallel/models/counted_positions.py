"""Models of transformers that take no `position_ids`, and take them here.

The decoders of BART and its kin number the positions of what they are given from 0 on, and hand the
numbers to their `embed_positions`. A context-parallel one takes `position_ids` as other models do,
and its embedding gets these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .calls import forward_of, is_pretrained
from .override import running_override, unbound
from .settings import refusal, settings_of

_NAME, _ARGUMENT = "embed_positions", "position_ids"


def find_counted(model: nn.Module) -> list[nn.Module]:
    """Return the embeddings that a model hands positions which it has counted itself.

    There are none in a model of which a forward takes positions as an argument.
    """
    parts = [*filter(is_pretrained, model.modules())]
    if any(_takes_positions(part) for part in parts):
        return []
    tables = (module._modules.get(_NAME) for part in parts for module in part.modules())
    found = dict.fromkeys(t for t in tables if t is not None and _takes_positions(t))
    return [*found]


def _takes_positions(module: nn.Module) -> bool:
    return _ARGUMENT in forward_of(module).parameters


def give_positions(model: nn.Module, tables: list[nn.Module]) -> None:
    """Let a model's embeddings of positions have those that the model is called with, in place."""
    for module in tables:
        module.forward = MethodType(_around(module, _with_positions), module)
    if tables:
        model.forward = MethodType(_around(model, _without_positions), model)


def _around(module: nn.Module, make: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    own = module.__dict__.get("forward")
    return make(type(module).forward if own is None else unbound(own))


def _without_positions(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop(_ARGUMENT, None)  # the override knows them
        return inner(self, *args, **kwargs)

    return forward


def _with_positions(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        settings = settings_of(self)
        if settings is not None and settings.active:
            override = running_override(settings)
            given = None if override is None else override.given.get(_ARGUMENT)
            counted, name = kwargs.get(_ARGUMENT), type(self).__name__
            if counted is None:  # it counts them itself, the same for all rows
                length = inner(self, *args, **kwargs).shape[-2]
                counted = torch.arange(length)
            kwargs |= {_ARGUMENT: _in_place_of(counted, given, name)}
        return inner(self, *args, **kwargs)

    return forward


def _in_place_of(counted: Any, given: Any, name: str) -> Tensor:
    """Return the positions [B, L] that the model was given in the form of those that it counted.

    Raises:
        InvalidArgumentError: There are none, or they do not fit.
    """
    if not isinstance(given, Tensor):
        raise refusal(
            "the model was called without position_ids, and would count its positions from 0 on "
            "every rank: pass those of the shard, which shard_batch and ShardedSequences make"
        )
    if not isinstance(counted, Tensor) or counted.shape[-1:] != given.shape[-1:]:
        raise refusal(f"{name} was called with other positions than those of this shard")
    if counted.ndim == given.ndim:
        return given
    if counted.ndim != 1 or bool((given != given[:1]).any()):
        raise refusal(f"{name} takes the same positions for all rows, and position_ids differ")
    return given[0]
