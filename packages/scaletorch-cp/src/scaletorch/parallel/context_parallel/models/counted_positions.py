"""Models of transformers that take no `position_ids`, and take them here.

The decoders of BART and its kin number the positions of what they are given from 0 on, and hand the
numbers to their `embed_positions`; that of MusicGen numbers them itself. A context-parallel one
takes `position_ids` as other models do, and its embedding gets these, or gives the rows of these.
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

_NAME, _ARGUMENT, _START = "embed_positions", "position_ids", "cache_length"


def find_counted(model: nn.Module) -> list[nn.Module]:
    """Return the embeddings of positions that a model has counted itself, or that count them.

    There are none in a model of which a forward takes positions as an argument.
    """
    parts = [*filter(is_pretrained, model.modules())]
    if any(_takes_positions(part) for part in parts):
        return []
    tables = (module._modules.get(_NAME) for part in parts for module in part.modules())
    found = (t for t in tables if t is not None and (_takes_positions(t) or _counts_rows(t)))
    return [*dict.fromkeys(found)]


def _takes_positions(module: nn.Module) -> bool:
    return _ARGUMENT in forward_of(module).parameters


def _counts_rows(module: nn.Module) -> bool:
    """Return whether an embedding numbers what it is given from a start on, whatever it holds."""
    behind_padding = hasattr(module, "padding_idx")
    return _START in forward_of(module).parameters and not behind_padding


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
            if not _takes_positions(self):
                return _rows_of(given, functools.partial(inner, self, args[0]), name)
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


def _rows_of(given: Any, table: Callable[[int], Tensor], name: str) -> Tensor:
    """Return the rows [L, H] of the positions that the model was given.

    Args:
        given: The positions [B, L].
        table: Returns as many rows, from a position on.
        name: The embedding's.

    Raises:
        InvalidArgumentError: There are no positions, or they do not fit.
    """
    first = table(0)
    positions = _in_place_of(torch.arange(first.shape[-2]), given, name)
    if first.ndim != 2:
        raise refusal(f"{name} returns positions {list(first.shape)}, and not a row for each")
    starts = range(len(first), int(positions.max()) + 1, len(first))
    return torch.cat([first, *map(table, starts)]).index_select(0, positions)
