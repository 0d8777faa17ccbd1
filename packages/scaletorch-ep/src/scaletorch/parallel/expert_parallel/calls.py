"""The calls of a module of experts, read as rows with a routing, and run on received rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank

Run = Callable[[Tensor, Tensor, Tensor], Any]  # run(rows [P, H], index [P, K], weights [P, K])

ROUTED = "experts(hidden, top_k_index, top_k_weights)"
FOR_ALL = "experts(rows), as many rows for each expert"


class RoutedCall(NamedTuple):
    """A call, as rows with their experts.

    Attributes:
        hidden: [T, H].
        top_k_index: Integers [T, K].
        top_k_weights: [T, K].
        unit: Rows that stay together when rows are split over ranks.
        dims: Number of dims of the hidden states in the module's call.
        restore: Turns results [T, H] into the module's result.
    """

    hidden: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor
    unit: int
    dims: int
    restore: Callable[[Tensor], Tensor]


def read_call(
    own: Callable[..., Any],
    name: str,
    experts: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    for_all: bool,
) -> RoutedCall:
    """Return the arguments of a module's call, whatever their names.

    Args:
        own: The module's own forward.
        name: The module's name.
        experts: The number of all experts.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        for_all: Whether the module takes the same number of rows for each expert.

    Raises:
        InvalidArgumentError: It was called with other arguments.
    """
    number = 1 if for_all else 3
    given = list(args)
    if kwargs or len(given) != number:
        given = list(inspect.signature(own).bind(*args, **kwargs).arguments.values())
    if len(given) != number or not all(isinstance(each, Tensor) for each in given):
        what = FOR_ALL if for_all else "with hidden states, indices and weights alone"
        raise InvalidArgumentError(
            f"{describe_rank()}: '{name}' must be called {what}, got "
            f"{[type(each).__name__ for each in given]}"
        )
    return _read_rows(given[0], experts) if for_all else _read_routed(*given)


def _read_routed(hidden: Tensor, index: Tensor, weights: Tensor) -> RoutedCall:
    shape = hidden.shape
    rows = hidden if hidden.dim() == 2 else hidden.reshape(-1, shape[-1])
    return RoutedCall(rows, index, weights, 1, hidden.dim(), lambda results: results.view(shape))


def _read_rows(rows: Tensor, experts: int) -> RoutedCall:
    if rows.dim() != 2 or len(rows) % experts:
        raise InvalidArgumentError(
            f"{describe_rank()}: expected as many rows for each of {experts} experts, one expert "
            f"after another, got {tuple(rows.shape)}"
        )
    # By token, so that a share of the rows has the same number for each expert.
    by_token = rows.view(experts, -1, rows.shape[1]).transpose(0, 1).reshape(rows.shape)
    index = torch.arange(experts, device=rows.device).repeat(len(rows) // experts)[:, None]
    weights = rows.new_ones(index.shape)

    def restore(results: Tensor) -> Tensor:
        return results.view(-1, experts, results.shape[1]).transpose(0, 1).flatten(0, 1)

    return RoutedCall(by_token, index, weights, experts, 2, restore)


def runner(own: Callable[..., Any], dims: int, *, for_all: bool) -> Run:
    """Return the module's own forward as a function of rows, indices and weights.

    Args:
        own: The module's own forward.
        dims: As in `RoutedCall`.
        for_all: Whether it takes the same number of rows for each expert, in expert order.
    """
    if for_all:
        return lambda rows, index, weights: own(rows)
    return own if dims == 2 else partial(_run_shaped, own, dims)


def _run_shaped(
    own: Callable[..., Any], dims: int, rows: Tensor, index: Tensor, weights: Tensor
) -> Any:
    """Call a module that takes hidden states of more than two dims."""
    shaped = rows.view(*[1] * (dims - 2), *rows.shape)
    results = own(shaped, index, weights)
    fits = isinstance(results, Tensor) and results.shape == shaped.shape
    return results.view(rows.shape) if fits else results
