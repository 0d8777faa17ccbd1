"""How a module of experts is called: read into rows and their routing, run on rows that came."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank

Run = Callable[..., Any]  # run(rows, index, weights, sizes), without sizes if experts are routed
ROUTED, SORTED, ALL = "routed", "sorted", "all"


class Given(NamedTuple):
    """A call, as rows that each go to experts of their own.

    Attributes:
        hidden: [T, H].
        top_k_index: Integers [T, K].
        top_k_weights: [T, K].
        unit: Rows that stay together where rows are shared out.
        dims: Those of the hidden states, as the module was called.
        back: Returns results [T, O] as the module does.
        sizes: Pairs of a row and each expert, if the call tells.
    """

    hidden: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor
    unit: int
    dims: int
    back: Callable[[Tensor], Tensor]
    sizes: tuple[int, ...] | None = None


class Way(NamedTuple):
    """One way of calling experts.

    Attributes:
        words: How that looks.
        kinds: Of its arguments.
        read: Takes the arguments and the number of experts.
        run: Calls experts, given dims as in `Given`, and rows that lie one expert after another
            with indices and weights [P, 1] and how many each expert has.
        same_width: Results are as wide as rows, and of their dtype.
    """

    words: str
    kinds: tuple[type, ...]
    read: Callable[..., Given]
    run: Callable[..., Any]
    same_width: bool


def _read_routed(hidden: Tensor, index: Tensor, weights: Tensor, experts: int) -> Given:
    shape = hidden.shape
    rows = hidden if hidden.dim() == 2 else hidden.reshape(-1, shape[-1])
    return Given(rows, index, weights, 1, hidden.dim(), lambda results: results.view(shape))


def _run_routed(
    own: Callable[..., Any],
    dims: int,
    rows: Tensor,
    index: Tensor,
    weights: Tensor,
    sizes: Sequence[int] = (),
) -> Any:
    if dims == 2:
        return own(rows, index, weights)
    shaped = rows.view(*[1] * (dims - 2), *rows.shape)
    results = own(shaped, index, weights)
    fits = isinstance(results, Tensor) and results.shape == shaped.shape
    return results.view(rows.shape) if fits else results


def _read_sorted(rows: Tensor, sizes: list[int], experts: int) -> Given:
    if rows.dim() != 2 or len(sizes) != experts or sum(sizes) != len(rows):
        raise InvalidArgumentError(
            f"{describe_rank()}: expected rows [P, H], one expert after another, and how many each "
            f"of {experts} experts has, got {tuple(rows.shape)} and {sizes}"
        )
    numbers = torch.arange(experts, device=rows.device)
    index = numbers.repeat_interleave(
        torch.tensor(sizes, device=rows.device), output_size=len(rows)
    )
    weights = rows.new_ones((len(rows), 1))
    return Given(rows, index[:, None], weights, 1, 2, lambda results: results, tuple(sizes))


def _run_sorted(
    own: Callable[..., Any],
    dims: int,
    rows: Tensor,
    index: Tensor,
    weights: Tensor,
    sizes: Sequence[int],
) -> Any:
    return own(rows, list(sizes))


def _read_all(rows: Tensor, experts: int) -> Given:
    if rows.dim() != 2 or len(rows) % experts:
        raise InvalidArgumentError(
            f"{describe_rank()}: expected as many rows for each of {experts} experts, one expert "
            f"after another, got {tuple(rows.shape)}"
        )
    # By token, so that a rank that shares them out has as many of each expert.
    by_token = rows.view(experts, -1, rows.shape[1]).transpose(0, 1).reshape(rows.shape)
    index = torch.arange(experts, device=rows.device).repeat(len(rows) // experts)[:, None]
    weights = rows.new_ones(index.shape)

    def back(results: Tensor) -> Tensor:
        return results.view(-1, experts, results.shape[1]).transpose(0, 1).flatten(0, 1)

    sizes = (len(rows) // experts,) * experts
    return Given(by_token, index, weights, experts, 2, back, sizes)


def _run_all(
    own: Callable[..., Any],
    dims: int,
    rows: Tensor,
    index: Tensor,
    weights: Tensor,
    sizes: Sequence[int],
) -> Any:
    return own(rows)


WAYS: Mapping[str, Way] = {
    ROUTED: Way("experts(hidden, top_k_index, top_k_weights)", (Tensor, Tensor, Tensor),
                _read_routed, _run_routed, True),
    SORTED: Way("experts(rows, sizes), rows one expert after another", (Tensor, list),
                _read_sorted, _run_sorted, False),
    ALL: Way("experts(rows), as many rows for each expert", (Tensor,),
             _read_all, _run_all, False),
}  # fmt: skip


def read_call(
    own: Callable[..., Any], way: Way, name: str, experts: int, args: Any, kwargs: Any
) -> Given:
    """Return what a module was called with, by whatever names it has for its arguments.

    Raises:
        InvalidArgumentError: It was called with something else.
    """
    given = list(args)
    if kwargs or len(given) != len(way.kinds):
        given = list(inspect.signature(own).bind(*args, **kwargs).arguments.values())
    fits = len(given) == len(way.kinds) and all(map(isinstance, given, way.kinds))
    if not fits:
        what = "with hidden states, indices and weights alone" if way is WAYS[ROUTED] else way.words
        raise InvalidArgumentError(
            f"{describe_rank()}: '{name}' must be called {what}, got "
            f"{[type(each).__name__ for each in given]}"
        )
    return way.read(*given, experts)


def runner(own: Callable[..., Any], way: Way, dims: int, without: int | None) -> Run:
    """Return the module's own forward as one that takes rows, indices, weights and sizes.

    Args:
        own: The module's own forward.
        way: How it is called.
        dims: As in `Given`.
        without: An expert here that has no weights; None if there is none, or all are here.
    """
    run = partial(way.run, own, dims)
    return run if without is None else partial(_beside_nothing, run, without)


def _beside_nothing(
    run: Run,
    without: int,
    rows: Tensor,
    index: Tensor,
    weights: Tensor,
    sizes: Sequence[int] = (),
) -> Any:
    """Run experts on rows with one each, and beside it one without weights that counts nothing.

    Experts of LongCat take two choices of a row at least.
    """
    index = torch.cat((index, torch.full_like(index, without)), 1)
    return run(rows, index, torch.cat((weights, torch.zeros_like(weights)), 1))


def takes(module: nn.Module, number: int) -> bool:
    """Return whether a module can be called with so many arguments."""
    try:
        inspect.signature(module.forward).bind(*[None] * number)
    except TypeError:
        return False
    return True
