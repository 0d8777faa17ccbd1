"""Run a model's own experts on received rows, one row per pair of row and expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...dist.errors import InvalidArgumentError
from ...dist.functional import spmd_local
from ..pg_manager import describe_rank
from .exchange.dispatch import Dispatched, add_up, apply

# experts(hidden [P, H], top_k_index [P, 1], top_k_weights [P, 1]) -> [P, H]
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def compute(
    experts: Experts,
    received: Dispatched,
    count: int,
    parameters: Sequence[Tensor],
) -> tuple[Tensor, InvalidArgumentError | None]:
    """Return the results of the received rows, [R, H], and an error if the experts' are invalid.

    Experts are called with top-k 1: one row for each pair of a received row and one of this rank's
    `count` experts, in expert order. They compute nothing for remote experts. If no row was
    received, their stacked `parameters` get a gradient of zeros.
    """
    hidden, index, weights, route = received
    if not route.pairs:
        return apply(_NoRows, hidden, weights, *parameters), None
    numbers, order = index.flatten().sort(stable=True)  # remote experts come last
    numbers, order = numbers[: route.pairs, None], order[: route.pairs]
    top_k = index.shape[1]
    row, most = order.div(top_k, rounding_mode="floor"), min(count, top_k)  # experts of a row
    inputs, scales = apply(_Spread, hidden, weights, row, order, most)
    results = experts(inputs, numbers, scales)
    error = _result_error(results, inputs)
    if error is not None:
        results = inputs * 0
    return apply(_Fold, results, row, hidden.shape[0], most), error


def _result_error(results: Any, inputs: Tensor) -> InvalidArgumentError | None:
    got, remedy = f"a {type(results).__name__}", ""
    if isinstance(results, Tensor):
        if results.shape == inputs.shape and results.dtype == inputs.dtype:
            return None
        got = f"{results.dtype} {tuple(results.shape)}"
        if results.shape == inputs.shape:
            remedy = ": let them return results.to(hidden.dtype)"
    return InvalidArgumentError(
        f"{describe_rank()}: experts must return a tensor like their input, {inputs.dtype} "
        f"{tuple(inputs.shape)}, got {got}{remedy}"
    )


class _NoRows(Function):
    """Compute nothing, but continue the autograd graph as on ranks that received rows."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        """Return no results, [0, H]."""
        ctx.like = hidden, weights, *parameters
        ctx.save_for_backward(hidden.new_empty(0))
        return hidden.new_empty((0, hidden.shape[1]))

    @staticmethod
    def spmd_typecheck(output: Any, *, hidden: Tensor, weights: Tensor, parameters: Any) -> None:
        """Give the output the type of experts' results."""
        spmd_local(output, hidden, weights, *parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return zeros for each input that needs a gradient."""
        _ = ctx.saved_tensors  # all ranks recompute now
        needed = zip(ctx.like, ctx.needs_input_grad, strict=True)
        return tuple(torch.zeros_like(each) if needs else None for each, needs in needed)


class _Spread(Function):
    """Copy a row and its weight for each pair; backward adds up the rows' gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, row: Tensor, order: Tensor, most: int
    ) -> tuple[Tensor, Tensor]:
        """Return `rows[row]` and, of shape [P, 1], `weights.flatten()[order]`."""
        ctx.row, ctx.order, ctx.most = row, order, most
        ctx.rows, ctx.weights = rows.shape[0], weights.shape
        return rows.index_select(0, row), weights.view(-1).index_select(0, order).unsqueeze_(1)

    @staticmethod
    def spmd_typecheck(
        outputs: Any, *, rows: Tensor, weights: Tensor, row: Tensor, order: Tensor
    ) -> None:
        """Give the outputs the type of the rows."""
        spmd_local(outputs, rows, weights, row, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Add up the gradients of each row, and return each weight's gradient at its index."""
        weights = grads[1].new_zeros(ctx.weights)
        weights.view(-1).index_copy_(0, ctx.order, grads[1].view(-1))
        rows = add_up(grads[0], ctx.row, ctx.rows, ctx.most)
        return rows, weights, None, None, None


class _Fold(Function):
    """Add up the results of each row; backward copies the gradient to each result."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, row: Tensor, rows: int, most: int) -> Tensor:
        """Return [rows, H]."""
        ctx.save_for_backward(row)
        return add_up(results, row, rows, most)

    @staticmethod
    def spmd_typecheck(output: Any, *, results: Tensor, row: Tensor) -> None:
        """Give the output the type of the results."""
        spmd_local(output, results, row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of each result."""
        (row,) = ctx.saved_tensors  # all ranks recompute now: see `_Synchronise`
        return grads[0].index_select(0, row), None, None, None
