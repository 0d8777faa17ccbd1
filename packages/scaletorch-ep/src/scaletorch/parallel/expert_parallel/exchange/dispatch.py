"""The dispatch of tokens to the ranks of their experts, and back: dropless and differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ....dist import Work, get_rank, get_world_size
from ....dist.building import all_to_all_flat, sum_dtype
from ....dist.errors import InvalidArgumentError
from ....dist.functional import spmd_local
from ...pg_manager import axis_group, describe_rank
from .routes import Route, check_shapes, counts_of, find_route, numbers_of

# Weights and indices travel as integers of the weights' width.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Dispatched(NamedTuple):
    """The rows that this rank received, each with at least one of this rank's experts.

    Indices count from this rank's first expert; a remote expert's is the number of local ones.
    """

    hidden: Tensor  # [R, H]
    top_k_index: Tensor  # int64 [R, K]
    top_k_weights: Tensor  # [R, K]; 0 if the expert is another rank's
    route: Route  # the argument of `combine` for these rows


def dispatch(
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    experts: int | Sequence[int],
    group: ProcessGroup | None = None,
) -> Dispatched:
    """Send every token to the ranks that have its experts, once to each; all ranks call it.

    No token is dropped, whatever the imbalance; ranks may send or receive no tokens. One small
    all-to-all sends the counts, then two concurrent ones send the rows. Backward sends gradients
    the other way with the same counts. Either all ranks or none run it, so if one rank needs
    gradients, all compute them.

    Args:
        hidden: Tokens of this rank, float [T, H]; T may be 0.
        top_k_index: Experts of each token, integers [T, K] from 0.
        top_k_weights: The router's weights for them, float [T, K].
        experts: Number of experts, divided into contiguous ranges, one more on the first ranks; or
            the number on each rank.
        group: The ranks; None is the manager's `ep` axis.

    Raises:
        InvalidArgumentError: Shapes do not fit, an index is out of range, or a rank would have no
            expert.
        MismatchError: The ranks' sizes or dtypes differ, or another rank has such an index.

    Example:
        >>> rows = dispatch(hidden, top_k_index, top_k_weights, experts=8, group=group)
        >>> hidden = combine(own_experts(*rows[:3]), rows.route)
    """
    group = axis_group("ep", group)
    counts = counts_of(experts, get_world_size(group))
    check_shapes(hidden, top_k_index, top_k_weights)
    route = find_route(hidden, top_k_index, top_k_weights, counts, group)
    return dispatch_along(route, hidden, top_k_index, top_k_weights, counts)


def dispatch_along(
    route: Route,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    counts: tuple[int, ...],
) -> Dispatched:
    """Dispatch along a route that has been found; see `dispatch`."""
    if sum(counts) >= 1 << 8 * top_k_weights.element_size() - 1:
        raise InvalidArgumentError(
            f"got {sum(counts)} experts, but their indices travel as integers of the weights' "
            f"width, and {top_k_weights.dtype} is too narrow: use float32 weights"
        )
    if route.backward and not (hidden.requires_grad or top_k_weights.requires_grad):
        hidden = hidden.detach().requires_grad_()  # another rank needs gradients: all send them
    rank = get_rank(route.group)
    numbers = numbers_of(counts, rank, hidden.device)
    arguments = hidden, top_k_weights, top_k_index, route, numbers, counts[rank]
    rows, weights, index = apply(_Dispatch, *arguments)
    return Dispatched(rows, index, weights, route)


def combine(rows: Tensor, route: Route) -> Tensor:
    """Send results back and add those of each token, more than two in float32 at least.

    Args:
        rows: Weighted results of the received rows, [R, H].
        route: The route that `dispatch` returned with them; all ranks call this for it.

    Returns:
        [T, H] in the dtype of `rows`.

    Raises:
        InvalidArgumentError: There are more or fewer rows than were received.
    """
    if rows.dim() != 2 or len(rows) != sum(route.receives):
        raise InvalidArgumentError(
            f"{describe_rank()}: expected results [{sum(route.receives)}, H], one for each row "
            f"received, got {tuple(rows.shape)}"
        )
    if torch.is_grad_enabled():
        rows = apply(_Synchronise, rows if rows.requires_grad else rows.detach().requires_grad_())
    combined: Tensor = apply(_Combine, rows, route)
    return combined


def apply(function: type[Function], *args: Any) -> Any:
    """Apply an autograd function, for which torch has no type."""
    return function.apply(*args)


class _Dispatch(Function):
    """Send rows and their routing to the ranks of their experts; backward sends gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weights: Tensor,
        index: Tensor,
        route: Route,
        numbers: Tensor,  # the local number of each expert
        local: int,  # number of this rank's experts
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the received hidden states [R, H], weights and indices [R, K]."""
        kind = _INTEGERS[weights.element_size()]
        routing = torch.cat((weights.view(kind), index.to(kind)), 1)
        works = [_send(each.index_select(0, route.rows), route) for each in (hidden, routing)]
        rows, received = (work.wait() for work in works)
        scales, experts = received.view(-1, 2, weights.shape[1]).unbind(1)
        indices = numbers.take(experts.long())
        remote = indices == local
        scales = scales.view(weights.dtype).masked_fill(remote, 0)
        ctx.route, ctx.remote = route, remote
        ctx.mark_non_differentiable(indices)
        return rows.view(-1, hidden.shape[1]), scales, indices

    @staticmethod
    def spmd_typecheck(
        outputs: Any, *, hidden: Tensor, weights: Tensor, index: Tensor, numbers: Tensor
    ) -> None:
        """Give the outputs the type of the tokens, for the checker of `spmd_types`."""
        spmd_local(outputs, hidden, weights, index, numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of hidden states and weights: all ranks send both."""
        gradients = grads[0].contiguous(), grads[1].masked_fill(ctx.remote, 0).contiguous()
        works = [_send(each, ctx.route, back=True) for each in gradients]
        received = [
            work.wait().view(-1, each.shape[1]) for work, each in zip(works, gradients, strict=True)
        ]
        return *(_add_up(each, ctx.route) for each in received), None, None, None, None


class _Combine(Function):
    """Send results back to their tokens and add them up; backward sends each result's gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        """Return [T, H]."""
        ctx.route = route
        back = _send(rows.contiguous(), route, back=True).wait()
        return _add_up(back.view(-1, rows.shape[1]), route)

    @staticmethod
    def spmd_typecheck(output: Any, *, rows: Tensor) -> None:
        """Give the output the type of the rows."""
        spmd_local(output, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Send each token's gradient to the ranks that had it."""
        received = _send(grads[0].index_select(0, ctx.route.rows), ctx.route).wait()
        return received.view(-1, grads[0].shape[1]), None


class _Synchronise(Function):
    """Identity before a call that all ranks make, so that all recompute at the same time.

    `torch.utils.checkpoint` recomputes when backward first unpacks a saved tensor, and only up to
    the last one. A rank that received no rows saves fewer tensors than others. It would recompute
    the dispatch at another time, or not at all. So this function makes all save and unpack one.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        """Return `rows`."""
        ctx.save_for_backward(rows.new_empty(0))
        return rows.view_as(rows)

    @staticmethod
    def spmd_typecheck(output: Any, *, rows: Tensor) -> None:
        """Give the output the type of the rows."""
        spmd_local(output, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Pass the gradient on."""
        _ = ctx.saved_tensors
        return grads[0]


def _send(rows: Tensor, route: Route, *, back: bool = False) -> Work[Tensor]:
    """Send rows [S, …] to the ranks of the experts, or [R, …] back; the work returns them flat."""
    width = rows.shape[1:].numel()
    sends, receives = ([count * width for count in each] for each in (route.sends, route.receives))
    if back:
        sends, receives = receives, sends
    return all_to_all_flat(rows.view(-1), sends, receives, route.group)


def _add_up(rows: Tensor, route: Route) -> Tensor:
    """Add rows [S, …] of the same token, one rank after another."""
    return add_up(rows, route.rows, route.tokens, route.most, route.sends)


def add_up(
    rows: Tensor, index: Tensor, size: int, most: int, chunks: Sequence[int] | None = None
) -> Tensor:
    """Add rows [S, H] to zeros [size, H] at `index`, [S]; return their dtype.

    A sum of two is rounded once, whatever the dtype and the order; if a sum has `most` > 2 rows,
    they are added in float32 at least. `chunks` are the numbers of rows to add at a time.
    """
    dtype = rows.dtype if most <= 2 else sum_dtype(rows.dtype)
    total = rows.new_zeros((size, *rows.shape[1:]), dtype=dtype)
    if most <= 2 or chunks is None:
        return total.index_add_(0, index, rows.to(dtype)).to(rows.dtype)
    for places, chunk in zip(index.split(list(chunks)), rows.split(list(chunks)), strict=True):
        total.index_add_(0, places, chunk.to(dtype))
    return total.to(rows.dtype)
