"""A model's own experts on the rows that came: pairs of a row and one expert, results added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...dist.errors import InvalidArgumentError
from ..pg_manager import describe_rank
from .exchange.dispatch import Dispatched, add_up, apply

# experts(hidden [P, H], top_k_index [P, 1], top_k_weights [P, 1]) -> [P, H]
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def compute(
    experts: Experts,
    came: Dispatched,
    count: int,
    parameters: Sequence[Tensor],
) -> tuple[Tensor, InvalidArgumentError | None]:
    """Return the results of the rows that came, [R, H], and what is wrong with the experts' own.

    Experts are called with top-k 1, a row for each pair of a row that came and an expert here, one
    expert after another: so they need to know nothing of experts that are elsewhere, and compute
    nothing for them.

    Args:
        experts: The model's own forward, with indices from 0 to `count` - 1.
        came: What `dispatch` returned.
        count: Experts here.
        parameters: Those of all experts together, which get a gradient of zeros if no row came,
            as they do where no token of a batch chooses an expert.
    """
    hidden, index, weights, route = came
    if not route.pairs:
        return apply(_Idle, hidden, weights, *parameters), None
    numbers, order = index.flatten().sort(stable=True)  # experts elsewhere come last
    numbers, order = numbers[: route.pairs, None], order[: route.pairs]
    top_k = index.shape[1]
    row, most = order.div(top_k, rounding_mode="floor"), min(count, top_k)  # experts of a row
    taken, scales = apply(_Spread, hidden, weights, row, order, most)
    results = experts(taken, numbers, scales)
    wrong = _wrong(results, taken)
    if wrong is not None:
        results = taken * 0
    return apply(_Fold, results, row, hidden.shape[0], most), wrong


def _wrong(results: Any, taken: Tensor) -> InvalidArgumentError | None:
    got, way_out = f"a {type(results).__name__}", ""
    if isinstance(results, Tensor):
        if results.shape == taken.shape and results.dtype == taken.dtype:
            return None
        got = f"{results.dtype} {tuple(results.shape)}"
        if results.shape == taken.shape:
            way_out = ": let them return results.to(hidden.dtype)"
    return InvalidArgumentError(
        f"{describe_rank()}: experts must return what they are given, {taken.dtype} "
        f"{tuple(taken.shape)}, got {got}{way_out}"
    )


class _Idle(Function):
    """No rows: nothing is computed, and the graph goes on as it does on the other ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        """Return no results, [0, H]."""
        ctx.like = hidden, weights, *parameters
        ctx.save_for_backward(hidden.new_empty(0))
        return hidden.new_empty((0, hidden.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return zeros for what needs a gradient."""
        _ = ctx.saved_tensors  # recomputed here by all ranks
        needed = zip(ctx.like, ctx.needs_input_grad, strict=True)
        return tuple(torch.zeros_like(each) if needs else None for each, needs in needed)


class _Spread(Function):
    """A row and its weight for each pair; backward adds up rows, as `add_up` does."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, row: Tensor, order: Tensor, most: int
    ) -> tuple[Tensor, Tensor]:
        """Return `rows[row]` and, of shape [P, 1], `weights.flatten()[order]`."""
        ctx.row, ctx.order, ctx.most = row, order, most
        ctx.rows, ctx.weights = rows.shape[0], weights.shape
        return rows.index_select(0, row), weights.view(-1).index_select(0, order).unsqueeze_(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Add up the gradients of each row, and put those of weights in their places."""
        of_weights = grads[1].new_zeros(ctx.weights)
        of_weights.view(-1).index_copy_(0, ctx.order, grads[1].view(-1))
        rows = add_up(grads[0], ctx.row, ctx.rows, ctx.most)
        return rows, of_weights, None, None, None


class _Fold(Function):
    """The results of each row added up by `add_up`; backward gives each the gradient."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, row: Tensor, rows: int, most: int) -> Tensor:
        """Return [rows, H]."""
        ctx.save_for_backward(row)
        return add_up(results, row, rows, most)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of each result."""
        (row,) = ctx.saved_tensors  # recomputed here by all ranks, as `_Meet` has it
        return grads[0].index_select(0, row), None, None, None
